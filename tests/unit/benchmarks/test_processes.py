"""Peers as processes, with this interpreter in the place of a peer's and a script that answers at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import processes
from benchmarks.peers.processes import PeerFailed, PeerProcess, environment, start_peer

SCRIPT = """
import os, sys
sys.path.insert(0, {loop!r})
from peer_loop import run

def make(options):
    print("this goes to the log")
    def generate(prompts, max_tokens, stream):
        if options.get("break"):
            raise RuntimeError("the engine broke")
        return [[os.getpid()] * max_tokens for _ in prompts], [[0.5] * max_tokens for _ in prompts]
    return generate

run(make)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fake/bin").mkdir(parents=True)
    (tmp_path / "fake/bin/python").symlink_to(sys.executable)
    loop = str(Path(processes.__file__).parent)
    (tmp_path / "fake_peer.py").write_text(SCRIPT.format(loop=loop))
    monkeypatch.setattr(processes, "PEERS", tmp_path)
    monkeypatch.setattr(processes, "__file__", str(tmp_path / "processes.py"))
    return tmp_path


@pytest.fixture
def peer(home: Path) -> Iterator[PeerProcess]:
    found = start_peer("fake", {}, home / "log")
    yield found
    found.close()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_it_answers_and_is_stopped_between_answers(peer: PeerProcess, home: Path) -> None:
    for _ in range(2):
        answer = peer.generate([[1, 2], [3]], 3)
        pid = answer.tokens[0][0]
        assert answer.tokens == [[pid] * 3] * 2
        assert answer.times == [[0.5] * 3] * 2
        # The kernel stops a process when it is next scheduled.
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert state(pid) == "T"
    assert "this goes to the log" in (home / "log").read_text()


def test_closing_ends_a_stopped_process(home: Path) -> None:
    peer = start_peer("fake", {}, home / "log")
    pid = peer.generate([[1]], 1).tokens[0][0]
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_breaks_says_what_its_log_says(home: Path) -> None:
    peer = start_peer("fake", {"break": True}, home / "log")
    with pytest.raises(PeerFailed, match=r"fake has ended: .*the engine broke"):
        peer.generate([[1]], 1)
    peer.close()


def test_one_that_was_killed_has_ended(peer: PeerProcess) -> None:
    os.kill(peer.generate([[1]], 1).tokens[0][0], signal.SIGKILL)
    with pytest.raises(PeerFailed, match="fake has ended"):
        peer.generate([[1]], 1)


def test_one_that_is_not_built_says_how_to_build_it(home: Path) -> None:
    with pytest.raises(PeerFailed, match="make peers"):
        start_peer("vllm", {}, home / "log")


def test_a_benchmark_that_is_told_to_end_closes_what_it_started(home: Path) -> None:
    program = f"""
import signal
from contextlib import closing
from pathlib import Path
from benchmarks.peers import processes
processes.PEERS, processes.__file__ = Path({str(home)!r}), {str(home / "processes.py")!r}
processes.close_on_sigterm()
with closing(processes.start_peer("fake", {{}}, Path({str(home / "log")!r}))) as peer:
    print(peer.generate([[1]], 1).tokens[0][0], flush=True)
    signal.pause()
"""
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.terminate()
        assert process.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_vllm_is_bound_to_the_cores_and_gets_its_libraries(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        (tmp_path / "lib" / name).touch()
    found = environment("vllm", tmp_path, {"PATH": "/bin", "PYTHONPATH": "/ours"})
    assert found["LD_PRELOAD"] == f"{tmp_path}/lib/libtcmalloc_minimal.so.4:{tmp_path}/lib/libiomp5.so"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert found["PATH"] == "/bin"
    assert "PYTHONPATH" not in found
    assert "LD_PRELOAD" not in environment("hf", tmp_path, {})
