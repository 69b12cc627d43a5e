import json
import re
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stepwire.rpc.server import AddressInUse
from stepwire.telemetry import names
from stepwire.traces import Page, SpanEvent, TraceStore, serve_page
from stepwire.traces.page import content_security_policy
from tests.support.traces import MS, TRACE_ID, span

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\"'&`${alert(3)}"


@pytest.fixture
def store() -> TraceStore:
    return TraceStore()


@pytest.fixture
def page(store: TraceStore) -> Iterator[Page]:
    page = serve_page(store, port=0)
    yield page
    page.close()


def fetch(page: Page, path: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(page.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def get(page: Page, path: str) -> Any:
    status, headers, body = fetch(page, path)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body)


def fill(store: TraceStore, num_traces: int) -> None:
    for i in range(num_traces):
        attributes = {"stepwire.request_id": f"r{i}", "gen_ai.request.model": "Tiny"}
        store.add([span("a", trace_id=f"{i:032x}", start_ns=i * MS, attributes=attributes, is_error=i % 10 == 0)])


def test_the_list_is_newest_first_and_paged(store: TraceStore, page: Page) -> None:
    fill(store, 150)
    answer = get(page, "api/traces?limit=100")
    assert [trace["request_id"] for trace in answer["traces"]] == [f"r{149 - i}" for i in range(100)]
    assert (answer["has_more"], answer["num_traces"]) == (True, 150)
    rest = get(page, "api/traces?limit=100&offset=100")
    assert (len(rest["traces"]), rest["has_more"]) == (50, False)


def test_finding(store: TraceStore, page: Page) -> None:
    fill(store, 30)
    assert [trace["request_id"] for trace in get(page, "api/traces?text=R17")["traces"]] == ["r17"]
    assert len(get(page, "api/traces?text=tiny&errors=1")["traces"]) == 3
    assert len(get(page, f"api/traces?text={7:032x}")["traces"]) == 1
    assert get(page, "api/traces?text=absent")["traces"] == []


@pytest.mark.parametrize("query", ["limit=x", "limit=-1", "limit=" + "9" * 400, "offset=1e9", "text=%ff%00", "&&=&;"])
def test_queries_that_make_no_sense_are_harmless(store: TraceStore, page: Page, query: str) -> None:
    fill(store, 3)
    assert get(page, f"api/traces?{query}")["num_traces"] == 3


def test_one_trace(store: TraceStore, page: Page) -> None:
    event = SpanEvent("first_token", 6 * MS, {"n": 1})
    child = span("child", "root", service="b", start_ns=5 * MS, attributes={"n": 2, "f": True}, events=(event,))
    store.add([child, span("root")])
    answer = get(page, f"api/traces/{TRACE_ID}")
    assert (answer["name"], answer["services"], answer["duration_ms"]) == ("root", ["a", "b"], 10)
    root, shown = answer["spans"]
    assert (root["depth"], shown["depth"], shown["offset_ms"], shown["duration_ms"]) == (0, 1, 5, 5)
    assert shown["attributes"] == {"f": "True", "n": "2"}
    assert shown["events"] == [{"name": "first_token", "offset_ms": 6, "attributes": {"n": "1"}}]
    assert fetch(page, f"api/traces/{'0' * 32}")[0] == 404


@pytest.mark.parametrize("path", ["nothing", "api/traces/zz", "api/traces/../../etc/passwd", "page.html", "%00"])
def test_other_paths_are_not_found(page: Page, path: str) -> None:
    assert fetch(page, path)[0] == 404


def test_a_page_of_another_name_may_not_read(page: Page) -> None:
    """A name that was rebound to this address reaches the server, but is not answered."""
    for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1.evil.example", ""):
        assert fetch(page, "api/traces", Host=host)[0] == 403
    assert fetch(page, "api/traces", Host=f"localhost:{page.port}")[0] == 200


def test_it_listens_on_loopback_alone_and_a_port_in_use_is_named(store: TraceStore, page: Page) -> None:
    assert page.url == f"http://127.0.0.1:{page.port}/"
    with pytest.raises(AddressInUse, match=str(page.port)):
        serve_page(store, port=page.port)


def test_the_page_is_whole_and_fetches_nothing_from_elsewhere(page: Page) -> None:
    status, headers, body = fetch(page)
    text = body.decode()
    assert status == 200 and "Stepwire traces" in text
    assert not re.search(r"https?://|src=|@import|url\(", text)
    policy = headers["Content-Security-Policy"]
    assert policy == content_security_policy(body)
    assert "unsafe" not in policy and "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|setAttribute", text)
    assert " style=" not in text and " onclick=" not in text, "the policy would block them"


def test_ten_thousand_traces_are_kept_listed_and_searched(store: TraceStore, page: Page) -> None:
    fill(store, 10_000)
    assert get(page, "api/traces")["num_traces"] == 10_000
    assert [trace["request_id"] for trace in get(page, "api/traces?text=r9321")["traces"]] == ["r9321"]
    assert get(page, "api/traces?text=nowhere&order=slowest")["traces"] == []
    assert len(get(page, "api/traces?limit=100&offset=9950&errors=0&order=slowest")["traces"]) == 50


def test_the_slowest_and_the_kinds(store: TraceStore, page: Page) -> None:
    request = {names.GEN_AI_OPERATION: "chat"}
    store.add([span("a", trace_id=f"{1:032x}", end_ns=30 * MS, attributes=request)])
    store.add([span("a", trace_id=f"{2:032x}", end_ns=90 * MS, name=names.SPAN_STEP)])
    store.add([span("a", trace_id=f"{3:032x}", end_ns=60 * MS, attributes=request)])
    store.add([span("a", trace_id=f"{4:032x}", end_ns=5 * MS, name=names.SPAN_STARTUP)])
    store.add([span("a", trace_id=f"{5:032x}", end_ns=4 * MS, name=names.SPAN_GROUP_RECOVERY)])
    for number, phase in ((6, names.SPAN_STARTUP), (7, names.startup_span_name("load_model"))):
        # What an operator has brought, by a call.
        call = span("a", trace_id=f"{number:032x}", end_ns=2 * MS, name="stepwire.v1.AdminService/AddReplica")
        store.add([call, span("b", "a", trace_id=f"{number:032x}", end_ns=MS, name=phase)])

    def found(query: str) -> list[int]:
        return [int(trace["trace_id"], 16) for trace in get(page, f"api/traces?{query}")["traces"]]

    assert found("order=slowest") == [2, 3, 1, 4, 5, 7, 6]
    assert found("order=slowest&kind=requests&limit=1") == [3]
    assert (found("kind=steps"), found("kind=starts")) == ([2], [7, 6, 5, 4])
    assert found("kind=nonsense") == [7, 6, 5, 4, 3, 2, 1]


def test_a_trace_comes_with_the_steps_that_it_links_to(store: TraceStore, page: Page) -> None:
    step_id, absent = f"{7:032x}", f"{8:032x}"
    links = ((step_id, "01"), (step_id, "02"), (absent, "03"), (TRACE_ID, "04"))
    store.add([span("request", links=links, start_ns=100 * MS, end_ns=200 * MS)])
    times = {"start_ns": 120 * MS, "end_ns": 150 * MS}
    store.add(
        [
            span("s", trace_id=step_id, name=names.SPAN_STEP, **times),
            span("w", "s", trace_id=step_id, name=names.SPAN_STEP_WORKER, attributes={names.RANK: 1}, **times),
            span("f", "w", trace_id=step_id, name=names.SPAN_STEP_FORWARD, **times),
        ]
    )
    (linked,) = get(page, f"api/traces/{TRACE_ID}")["linked"]
    assert (linked["trace_id"], linked["kind"], linked["offset_ms"]) == (step_id, "steps", 20)
    assert linked["parts"] == [{"name": "forward", "rank": 1, "offset_ms": 20, "duration_ms": 30}]


def test_a_trace_can_be_saved(store: TraceStore, page: Page) -> None:
    store.add([span("01" * 8)])
    assert get(page, f"api/traces/{TRACE_ID}/otlp.json")["resourceSpans"]
    status, headers, body = fetch(page, f"api/traces/{TRACE_ID}/otlp")
    assert (status, headers["Content-Type"]) == (200, "application/x-protobuf")
    assert ExportTraceServiceRequest.FromString(body).resource_spans
    assert fetch(page, f"api/traces/{'0' * 32}/otlp")[0] == 404


def test_a_client_that_says_nothing_holds_nobody_up(store: TraceStore, page: Page) -> None:
    with socket.create_connection(("127.0.0.1", page.port)):
        assert get(page, "api/traces")["num_traces"] == 0


FAKE_BROWSER = """
const fs = require("fs"), vm = require("vm");
const { script, answers, hash } = JSON.parse(fs.readFileSync(0, "utf8"));
class Node { constructor() { this.children = []; this.style = {}; this.listeners = {}; }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  after(node) { this.next = node; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  get firstChild() { return this.children[0]; }
  set innerHTML(value) { throw new Error("markup is parsed"); } }
const make = (tag) => Object.assign(new Node(), { tag, value: "", checked: false });
const byId = {};
const document = { hidden: false, createElement: make,
  createTextNode: (text) => Object.assign(new Node(), { text }),
  getElementById: (id) => (byId[id] ??= make("id-" + id)) };
const asked = [];
const fetchFake = async (address) => { asked.push(address);
  return { text: async () => answers[address.startsWith("/api/traces?") ? "list" : "trace"] }; };
const context = { document, Node, location: { hash }, fetch: fetchFake, setInterval() {}, addEventListener() {},
  URLSearchParams, encodeURIComponent, Date, JSON, Math, Object, String };
vm.runInNewContext(script, context);
setTimeout(() => {
  const tags = new Set(), texts = [];
  const visit = (node) => { if (node.tag) tags.add(node.tag); if (node.text !== undefined) texts.push(node.text);
    for (const key of Object.keys(node)) if (key.startsWith("on")) throw new Error(key);
    if (node.listeners.click && node.className === "row") { node.listeners.click(); visit(node.next); }
    node.children.forEach(visit); };
  visit(byId.main);
  console.log(JSON.stringify({ tags: [...tags].sort(), texts, asked, status: byId.status.textContent }));
}, 50);
"""


def in_browser(answers: dict[str, str], hash: str) -> Any:
    """Runs the page's script in Node against a document that only knows elements and text."""
    html = files("stepwire.traces").joinpath("page.html").read_text()
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)
    assert script is not None
    given = json.dumps({"script": script[1], "answers": answers, "hash": hash})
    command = ["node", "-e", FAKE_BROWSER]
    done = subprocess.run(command, check=False, input=given, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hostile_names_stay_text(store: TraceStore, page: Page) -> None:
    event = SpanEvent(HOSTILE, 0, {HOSTILE: HOSTILE})
    attributes = {"stepwire.request_id": HOSTILE, HOSTILE: HOSTILE}
    fields: Any = {"name": HOSTILE, "service": HOSTILE, "kind": HOSTILE, "status_message": HOSTILE}
    store.add([span("a", attributes=attributes, events=(event,), is_error=True, **fields)])
    _, headers, listed = fetch(page, "api/traces")
    assert headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
    _, _, shown = fetch(page, f"api/traces/{TRACE_ID}")
    answers = {"list": listed.decode(), "trace": shown.decode()}

    found = in_browser(answers, "")
    assert found["tags"] == ["id-main", "span", "table", "tbody", "td", "th", "thead", "tr"]
    assert found["texts"].count(HOSTILE) == 3, "name, service, request id"
    assert found["status"] == "1 traces"

    found = in_browser(answers, "#" + TRACE_ID)
    assert found["asked"] == [f"/api/traces/{TRACE_ID}"]
    assert found["tags"] == ["a", "b", "button", "dd", "div", "dl", "dt", "id-main", "p", "span"]
    assert found["texts"].count(HOSTILE) >= 9, "name, service, kind, status, keys and values, event"
