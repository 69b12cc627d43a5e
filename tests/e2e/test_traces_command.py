"""A request's trace, from `stepwire generate` to `stepwire traces show`."""

from pathlib import Path

from stepwire.supervisor.ports import free_port
from tests.support.processes import SERVICES, run, running, serving, wait_for_trace


def test_a_request_is_one_trace_through_all_services(tiny_model: Path, tmp_path: Path) -> None:
    listen, page = f"127.0.0.1:{free_port()}", free_port()
    arguments = ["traces", "--listen", listen, "--page", f"127.0.0.1:{page}"]
    with running(arguments, tmp_path / "traces.log"), serving(tiny_model, tmp_path, "--otlp-endpoint", listen) as stack:
        request = ["--target", stack.target, "--otlp-endpoint", listen, "--request-id", "the-one", "--max-tokens", "4"]
        assert run("generate", "abc", *request).returncode == 0
        trace = wait_for_trace(page, "the-one")
        shown = run("traces", "show", "the-one", "--page", f"127.0.0.1:{page}")
    assert len({span.trace_id for span in trace.spans}) == 1
    known = {span.span_id for span in trace.spans}
    assert [span.name for span in trace.spans if span.parent_id not in known] == [
        "stepwire.v1.InferenceService/Generate"
    ]
    assert trace.root.service == "stepwire-client"
    assert {"queue", "prefill", "decode", "worker.prefill", "worker.decode"} <= {span.name for span in trace.spans}
    assert shown.returncode == 0
    assert all(service in shown.stdout for service in SERVICES)
