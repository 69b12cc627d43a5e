import itertools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loader.errors import CheckpointError, LoadCancelled
from loader.sources import lock
from loader.sources.lock import STALE_S, Mark, Waiting, acquire, is_stale, read_owner
from loader.sources.owner import Owner

AT_ONCE = Waiting(patience_s=0.0)
ELSEWHERE = replace(Owner.here(), host="faraway", place="another machine", pid=7)
DEAD = replace(Owner.here(), pid=1 << 22)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_it_names_its_owner_while_it_is_held(path: Path) -> None:
    with acquire(path, AT_ONCE):
        owner = read_owner(path)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert list(path.parent.iterdir()) == []


def test_the_next_one_waits_is_told_for_whom_and_gets_it(path: Path) -> None:
    told: list[str] = []
    first = acquire(path, AT_ONCE)
    waits = threading.Event()

    def report(text: str) -> None:
        told.append(text)
        waits.set()

    def release() -> None:
        assert waits.wait(60)
        first.release()

    other = threading.Thread(target=release)
    other.start()
    with acquire(path, Waiting(report, patience_s=60, poll_s=0.001)):
        other.join()
        assert told == [f"waiting for process {os.getpid()} on {Owner.here().host}, which holds {path}"]


def test_waiting_ends_with_the_owners_name(path: Path) -> None:
    with acquire(path, AT_ONCE), pytest.raises(CheckpointError, match=f"process {os.getpid()} on") as caught:
        acquire(path, AT_ONCE)
    assert (caught.value.code, caught.value.file) == ("unavailable", path)


def test_patience_is_for_an_owner_that_does_not_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one second at each look: ten looks with progress, then five without."""
    seconds, asked = itertools.count(), []
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))

    def measure() -> int:
        asked.append(len(asked))
        return min(10, len(asked))

    with acquire(path, AT_ONCE), pytest.raises(CheckpointError, match="not gone on for 5 s"):
        acquire(path, Waiting(measure=measure, patience_s=5.0, poll_s=0.0))
    assert len(asked) == 15


def test_waiting_can_be_cancelled(path: Path) -> None:
    with acquire(path, AT_ONCE), pytest.raises(LoadCancelled):
        acquire(path, Waiting(cancelled=lambda: True))


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        pytest.param(DEAD.encode(), 0, id="dead"),
        pytest.param(ELSEWHERE.encode(), STALE_S + 5, id="silent elsewhere"),
        pytest.param(Owner.here().encode(), STALE_S + 5, id="silent here"),
        pytest.param(b"", STALE_S + 5, id="nobody"),
    ],
)
def test_a_lock_that_nobody_keeps_is_taken_over(path: Path, content: bytes, seconds: float) -> None:
    path.write_bytes(content)
    age(path, seconds)
    told: list[str] = []
    with acquire(path, Waiting(told.append, patience_s=0.0)) as mark:
        assert mark.is_held()
    assert len(told) == 1
    assert "took over" in told[0]
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("content", [ELSEWHERE.encode(), b""])
def test_one_that_may_be_kept_is_not(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    age(path, STALE_S - 20)
    assert not is_stale(path)
    with pytest.raises(CheckpointError, match="faraway" if content else "another process"):
        acquire(path, AT_ONCE)
    assert path.read_bytes() == content


def test_a_clock_that_is_wrong_here_does_not_matter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(ELSEWHERE.encode())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not is_stale(path)


def test_of_many_that_find_it_stale_one_has_it_at_a_time(path: Path) -> None:
    path.write_bytes(DEAD.encode())
    inside, most = 0, 0
    guard = threading.Lock()

    def take() -> None:
        nonlocal inside, most
        with acquire(path, Waiting(patience_s=60, poll_s=0.001)):
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert list(path.parent.iterdir()) == []


def test_a_live_lock_that_was_moved_by_mistake_is_put_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another took it over between our look at the stale one and our move."""
    path.write_bytes(ELSEWHERE.encode())
    real = lock.read_owner
    answers = [DEAD]
    monkeypatch.setattr(lock, "read_owner", lambda p: answers.pop() if answers else real(p))
    lock._remove_stale(path, lambda text: None)
    assert real(path) == ELSEWHERE
    assert [p.name for p in path.parent.iterdir()] == ["lock"]


def test_who_lost_it_does_not_remove_the_next_ones(path: Path) -> None:
    lost = acquire(path, AT_ONCE)
    path.write_bytes(ELSEWHERE.encode())
    assert not lost.is_held()
    lost.release()
    assert read_owner(path) == ELSEWHERE


def test_the_owner_keeps_it_fresh(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.001)
    with acquire(path, AT_ONCE):
        age(path, STALE_S + 5)
        while is_stale(path):
            threading.Event().wait(0.001)


def test_who_lost_it_does_not_keep_the_next_ones_fresh(path: Path) -> None:
    mark = Mark.try_make(path)
    assert mark is not None
    path.write_bytes(ELSEWHERE.encode())
    age(path, 40)
    before = path.stat().st_mtime
    mark.release()
    assert path.stat().st_mtime == before


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="STEPWIRE_CACHE") as caught:
        acquire(tmp_path / "missing" / "lock", AT_ONCE)
    assert caught.value.code == "unavailable"
