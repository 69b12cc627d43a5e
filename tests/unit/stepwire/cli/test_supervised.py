"""The supervisor as the engine sees it."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from scheduler_service.engine.supervision import ProcessEnd
from stepwire.cli.supervised import Supervised
from stepwire.rpc.errors import StepwireError
from stepwire.supervisor.line import MAX_LINE_BYTES, Record


class Line:
    """A line without a socket."""

    def __init__(self) -> None:
        self.said: list[Record] = []
        self.hear: Callable[[Record], None] = lambda _record: None

    def listen(self, listener: Callable[[Record], None]) -> None:
        self.hear = listener

    def say(self, record: Record) -> None:
        self.said.append(record)

    def tell(self, record: Record) -> None:
        """From another thread, as the real one does."""
        thread = threading.Thread(target=self.hear, args=(record,))
        thread.start()
        thread.join()


ENDED = {"ended": "127.0.0.1:5", "process_id": 77, "status": -9, "text": "worker 0 was killed by SIGKILL"}
END = ProcessEnd(-9, "worker 0 was killed by SIGKILL")


async def test_an_end_is_known_whether_it_is_told_before_or_while_it_is_waited_for() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    waiting = asyncio.create_task(supervised.end_of("127.0.0.1:5", 77, 5))
    other = asyncio.create_task(supervised.end_of("127.0.0.1:5", 78, 0.2))
    await asyncio.sleep(0)
    line.tell({"nothing": "of ours"})
    line.tell(ENDED)
    assert await waiting == END
    assert await supervised.end_of("127.0.0.1:5", 77, 0) == END
    assert await other is None


async def test_ends_are_not_kept_for_ever() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    for process_id in range(1000):
        line.tell({**ENDED, "process_id": process_id})
    assert await supervised.end_of("127.0.0.1:5", 999, 0) == END
    assert await supervised.end_of("127.0.0.1:5", 0, 0) is None


async def test_processes_of_one_id_on_two_machines_are_two() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    line.tell(ENDED)
    assert await supervised.end_of("10.0.0.2:5", 77, 0) is None


def test_a_worker_is_where_it_was_last_said_to_be() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    for place in ("10.0.0.2:5", "10.0.0.3:6"):
        line.tell({"worker": "10.0.0.1:5", "is_at": place})
        assert supervised.place_of("10.0.0.1:5") == place
    assert supervised.place_of("10.0.0.2:5") == "10.0.0.2:5"


def test_another_worker_is_asked_for_by_address_and_process() -> None:
    line = Line()
    Supervised(line).replace("127.0.0.1:5", 77)  # type: ignore[arg-type]
    assert line.said == [{"replace": "127.0.0.1:5", "process_id": 77}]


def test_that_requests_are_taken_is_said() -> None:
    line = Line()
    Supervised(line).serving()  # type: ignore[arg-type]
    assert line.said == [{"serving": True}]


async def test_workers_are_asked_for_and_come_with_their_models_settings() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    asked = asyncio.create_task(supervised.start_workers({"model": "/m"}))
    await asyncio.sleep(0)
    (said,) = line.said
    assert said["model"] == {"model": "/m"}
    line.tell({"answers": "another", "model": {}})
    line.tell({"answers": said["start_workers"], "model": {"model": "/m", "workers": ["h:1"]}})
    assert await asked == {"model": "/m", "workers": ["h:1"]}


async def test_a_refusal_is_the_error_that_it_was() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    asked = asyncio.create_task(supervised.start_workers({"model": "/m"}))
    await asyncio.sleep(0)
    refusal = {"reason": "OUT_OF_MEMORY", "error": "no room", "metadata": {"device": "cpu"}}
    line.tell({"answers": line.said[0]["start_workers"], **refusal})
    with pytest.raises(StepwireError, match="no room") as caught:
        await asked
    assert (caught.value.reason, caught.value.metadata) == ("OUT_OF_MEMORY", {"device": "cpu"})


def test_what_is_served_and_what_is_gone_is_told() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    supervised.end_workers(["h:1"])
    supervised.note_models([{"model": "/m"}])
    assert line.said == [{"end_workers": ["h:1"]}, {"models": [{"model": "/m"}]}]
    assert supervised.why_gone("h:1") is None
    line.tell({"gone": "h:1", "text": "why"})
    assert supervised.why_gone("h:1") == "why"


async def test_what_would_not_arrive_is_refused_since_nobody_would_answer() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        with pytest.raises(StepwireError, match="too long") as caught:
            await supervised.start_workers({"model": "/m", "adapter": "x" * MAX_LINE_BYTES})
    assert (caught.value.reason, line.said) == ("FIELD_OUT_OF_RANGE", [])


async def test_a_worker_at_the_address_of_one_that_is_gone_is_another() -> None:
    line = Line()
    supervised = Supervised(line)  # type: ignore[arg-type]
    line.tell({"gone": "h:1", "text": "why"})
    asked = asyncio.create_task(supervised.start_workers({"model": "/m"}))
    await asyncio.sleep(0)
    line.tell({"answers": line.said[0]["start_workers"], "model": {"model": "/m", "workers": ["h:1"]}})
    await asked
    assert supervised.why_gone("h:1") is None
