import asyncio
import threading

import pytest

from stepwire.traces import Trace, TraceStore
from tests.support.traces import MS, TRACE_ID, span


def shape(trace: Trace) -> list[tuple[int, str]]:
    return [(depth, span.name) for depth, span in trace.tree]


def test_a_tree_has_parents_before_children_and_siblings_by_start() -> None:
    store = TraceStore()
    store.add([span("late", "root", start_ns=5), span("leaf", "early", start_ns=2), span("early", "root", start_ns=1)])
    store.add([span("root")])
    trace = store.get(TRACE_ID.upper())
    assert trace is not None
    assert shape(trace) == [(0, "root"), (1, "early"), (2, "leaf"), (1, "late")]
    assert trace.root.name == "root"


def test_a_span_whose_parent_is_missing_is_a_root() -> None:
    store = TraceStore()
    store.add([span("b", "gone", start_ns=1), span("a", start_ns=2)])
    trace = store.get(TRACE_ID)
    assert trace is not None and shape(trace) == [(0, "b"), (0, "a")]


def test_parents_in_a_circle_are_shown_once() -> None:
    store = TraceStore()
    store.add([span("a", "c"), span("b", "a"), span("c", "b"), span("self", "self"), span("root")])
    trace = store.get(TRACE_ID)
    assert trace is not None
    assert sorted(name for _, name in shape(trace)) == ["a", "b", "c", "root", "self"]


def test_a_chain_of_any_depth_is_no_problem() -> None:
    store = TraceStore()
    store.add(span(str(i), str(i - 1) if i else "", start_ns=i) for i in range(5_000))
    trace = store.get(TRACE_ID)
    assert trace is not None and shape(trace)[-1] == (4_999, "4999")


def test_a_traces_extent_services_and_errors() -> None:
    store = TraceStore()
    store.add([span("r", end_ns=5 * MS), span("w", "r", service="b", start_ns=-MS, end_ns=9 * MS, is_error=True)])
    trace = store.get(TRACE_ID)
    assert trace is not None
    assert (trace.start_ns, trace.duration_ns, trace.num_errors) == (-MS, 10 * MS, 1)
    assert trace.services == ("a", "b")


def test_a_span_sent_twice_counts_once_and_the_last_wins() -> None:
    store = TraceStore()
    store.add([span("a"), span("a", name="again")])
    trace = store.get(TRACE_ID)
    assert trace is not None and [s.name for s in trace.spans] == ["again"]
    assert store.num_spans == 1


def test_the_oldest_traces_make_room() -> None:
    store = TraceStore(max_traces=3)
    for i in range(5):
        store.add([span("s", trace_id=f"{i:032x}")])
        store.add([span("t", trace_id=f"{0:032x}")])  # Keeps touching the first.
    assert store.num_traces == 3 and store.num_spans == 4
    assert [int(trace.trace_id, 16) for trace in store.recent()] == [0, 4, 3]


def test_spans_are_bounded_over_all_traces_and_in_each() -> None:
    store = TraceStore(max_spans=40)
    store.add(span(str(i)) for i in range(25))
    trace = store.get(TRACE_ID)
    assert trace is not None and (len(trace.spans), trace.num_dropped) == (10, 15)
    for number in range(1, 20):
        store.add(span(str(i), trace_id=f"{number:032x}") for i in range(10))
        assert store.num_spans <= 40
    assert store.num_traces == 4


def test_finding_traces() -> None:
    store = TraceStore()
    store.add(span("s", trace_id=f"{i:032x}", attributes={"stepwire.request_id": f"r{i % 3}"}) for i in range(9))
    found = store.by_request_id("r1")
    assert found is not None and int(found.trace_id, 16) == 7
    assert store.by_request_id("r9") is None
    assert store.by_attribute("other", "r1") is None
    page = store.recent(limit=2, offset=1, matches=lambda trace: trace.attribute("stepwire.request_id") == "r0")
    assert [int(trace.trace_id, 16) for trace in page] == [3, 0]


async def test_waiting_for_a_trace_that_comes_in_parts_from_a_thread() -> None:
    store = TraceStore()
    waiting = asyncio.create_task(store.wait_for(lambda trace: len(trace.spans) == 3, 5))
    await asyncio.sleep(0)
    thread = threading.Thread(target=lambda: [store.add([span(str(i))]) for i in range(3)])
    thread.start()
    trace = await waiting
    thread.join()
    assert len(trace.spans) == 3
    assert await store.wait_for(lambda trace: True, 0.01) is trace


async def test_waiting_in_vain() -> None:
    store = TraceStore()
    store.add([span("a")])
    with pytest.raises(TimeoutError):
        await store.wait_for(lambda trace: False, 0.02)
