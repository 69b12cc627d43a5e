"""Starts that cannot succeed: one line that says what is wrong and what to do, a status, and nothing left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwire.supervisor.ports import free_port
from tests.support.processes import ServeStack, children, run, running
from tests.support.stack import MARK_VARIABLE, marked
from tests.support.tiny_checkpoint import make_tiny_llama, tiny_tensors, write_safetensors
from tests.support.tiny_gguf import make_tiny_gguf

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 1234\n"


def plain_lines(text: str) -> list[str]:
    """What is for people: not the log records."""
    return [line for line in text.splitlines() if line and not line.startswith("{")]


def refusal(*arguments: str) -> str:
    """The one line that a command says before it ends with status 1; nothing of it may be left."""
    with marked() as mark:
        os.environ[MARK_VARIABLE] = mark
        try:
            done = run(*arguments)
        finally:
            del os.environ[MARK_VARIABLE]
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = plain_lines(done.stderr)
    return line


def cut(path: Path, num_bytes: int) -> None:
    """Takes bytes off the end of a file."""
    os.truncate(path, path.stat().st_size - num_bytes)


def nothing(folder: Path) -> Path:
    return folder / "nothing"


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def folder_of_something_else(folder: Path) -> Path:
    (folder / "notes.txt").write_text("no model")
    return folder


def text_file(folder: Path) -> Path:
    (folder / "notes.gguf").write_text("no model, whatever the name says")
    return folder / "notes.gguf"


def truncated_safetensors(folder: Path) -> Path:
    cut(make_tiny_llama(folder) / "model.safetensors", 1000)
    return folder


def truncated_shard(folder: Path) -> Path:
    cut(make_tiny_llama(folder, sharded=True) / "model-00002-of-00002.safetensors", 1)
    return folder


def missing_shard(folder: Path) -> Path:
    (make_tiny_llama(folder, sharded=True) / "model-00002-of-00002.safetensors").unlink()
    return folder


def truncated_gguf(folder: Path) -> Path:
    path = make_tiny_gguf(folder / "model.gguf")
    cut(path, 100)
    return path


def lfs_pointer_among_others(folder: Path) -> Path:
    (make_tiny_llama(folder) / "model.safetensors").write_text(LFS_POINTER)
    return folder


def lfs_pointer_to_gguf(folder: Path) -> Path:
    (folder / "model.gguf").write_text(LFS_POINTER)
    return folder / "model.gguf"


def tied_with_another_head(folder: Path) -> Path:
    tensors = tiny_tensors(
        json.loads((make_tiny_llama(folder, tie=True) / "config.json").read_text()), seed=0, tie=True
    )
    head = tensors["model.embed_tokens.weight"].copy()
    head[300, 5] += 1
    write_safetensors(folder / "model.safetensors", {**tensors, "lm_head.weight": head})
    return folder


def unknown_architecture(folder: Path) -> Path:
    return make_tiny_llama(folder, config_overrides={"architectures": ["BertForMaskedLM"], "model_type": "bert"})


def unknown_gguf_architecture(folder: Path) -> Path:
    return make_tiny_gguf(folder / "model.gguf", architecture="rwkv6")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (nothing, "nothing does not exist; pass a directory"),
        (empty_folder, "empty is empty; pass a directory"),
        (folder_of_something_else, "holds no checkpoint; pass a directory"),
        (text_file, r"notes.gguf .*; "),
        (truncated_safetensors, r"model.safetensors .*truncated.*; download"),
        (truncated_shard, r"model-00002-of-00002.safetensors .*truncated.*; download"),
        (missing_shard, r"model-00002-of-00002.safetensors.*; "),
        (truncated_gguf, r"model.gguf .*truncated.*; download"),
        (lfs_pointer_among_others, r"model.safetensors is a git-LFS pointer.*; fetch .*git lfs pull"),
        (lfs_pointer_to_gguf, r"model.gguf is a git-LFS pointer.*; fetch .*git lfs pull"),
        (unknown_architecture, r"BertForMaskedLM.*; "),
        (unknown_gguf_architecture, r"rwkv6.*; "),
    ],
)
def test_a_model_that_cannot_be_served(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    line = refusal("serve", "--model", str(make(tmp_path)), "--port", str(free_port()), "--log-dir", str(tmp_path))
    assert line.startswith("Error: ")
    assert re.search(said, line), line
    assert str(tmp_path) in line


def test_the_scheduler_alone_says_the_same(tmp_path: Path) -> None:
    line = refusal("scheduler", "--model", str(truncated_gguf(tmp_path)), "--port", "0", "--workers", "127.0.0.1:1")
    assert line.startswith("stepwire scheduler: ")
    assert re.search(r"model.gguf .*truncated.*; download", line), line


def test_a_port_in_use(tiny_model: Path, tiny_stack: ServeStack, tmp_path: Path) -> None:
    _, _, port = tiny_stack.target.partition(":")
    line = refusal("serve", "--model", str(tiny_model), "--port", port, "--log-dir", str(tmp_path))
    assert re.search(rf"127.0.0.1:{port} is in use .*--port", line), line
    assert run("generate", "abc", "--target", tiny_stack.target, "--max-tokens", "2").returncode == 0


def test_a_worker_whose_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal("worker", "--port", str(port))
    assert re.search(rf"127.0.0.1:{port} is in use .*--port", line), line


def test_a_worker_that_cannot_be_reached(tiny_model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = ["--port", "0", "--workers", address, "--worker-timeout", "0.5"]
    line = refusal("scheduler", "--model", str(tiny_model), *flags)
    assert re.search(rf"no worker answers at {address} within 0.5 s .*--workers", line), line


def test_a_cache_too_small_for_one_sequence(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--port", str(free_port()), "--log-dir", str(tmp_path)]
    line = refusal("serve", "--model", str(tiny_model), *flags, "--num-kv-blocks", "2")
    assert "512 tokens needs 32 KV blocks and num_kv_blocks asks for 2; lower max_model_len to at most 32" in line
    line = refusal("serve", "--model", str(tiny_model), *flags, "--kv-cache-bytes", "1000")
    assert "the 1000 bytes of kv_cache_bytes hold 0; raise kv_cache_bytes (OUT_OF_MEMORY)" in line


def test_what_only_the_worker_finds_reaches_the_terminal_whole(tmp_path: Path) -> None:
    """vllm #18455, #30021: all that was told of a worker that failed was that one did.

    A tied model whose stored head is another weight: headers do not tell, values do.
    """
    folder = tied_with_another_head(tmp_path / "model")
    done = run("serve", "--model", str(folder), "--port", str(free_port()), "--log-dir", str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = (line for line in plain_lines(done.stderr) if line.startswith("stepwire scheduler: "))
    assert re.search(
        r"load_model failed on rank 0 at 127.0.0.1:\d+ on host .*differs .* in row 300.*; set tie_word", line
    )
    (record,) = (json.loads(line) for line in done.stderr.splitlines() if '"start_failed"' in line)
    expected = {
        "reason": "CHECKPOINT_INVALID",
        "error_phase": "load_model",
        "error_rank": "0",
        "error_file": str(folder / "model.safetensors"),
        "error_tensor": "lm_head.weight",
        "error_expected": "the values of model.embed_tokens.weight",
        "error_found": "another row 300",
    }
    assert record | expected == record
    assert "set tie_word_embeddings to false" in record["error_remedy"]


def test_a_worker_that_dies_during_the_load_ends_its_scheduler(demo_model: Path, tmp_path: Path) -> None:
    port, worker_log, scheduler_log = free_port(), tmp_path / "worker.log", tmp_path / "scheduler.log"
    with marked() as mark, running(["worker", "--port", str(port)], worker_log, {MARK_VARIABLE: mark}) as worker:
        wait_for_line(worker_log, "listening", worker)
        arguments = ["scheduler", "--model", str(demo_model), "--port", "0", "--workers", f"127.0.0.1:{port}"]
        with running(arguments, scheduler_log, {MARK_VARIABLE: mark}) as scheduler:
            wait_for_line(worker_log, "INITIALISED", scheduler)
            worker.kill()
            assert scheduler.wait(30) == 1
    (line,) = plain_lines(scheduler_log.read_text())
    assert re.search(rf"load_model failed on rank 0 at 127.0.0.1:{port}", line), line
    assert "Traceback" not in scheduler_log.read_text()


def test_a_worker_that_dies_during_the_load_ends_serve(demo_model: Path, tmp_path: Path) -> None:
    """vllm #48031, PR #48871: a start that failed named an empty set of processes, and its status told of nothing."""
    port, log_path = free_port(), tmp_path / "serve.log"
    arguments = ["serve", "--model", str(demo_model), "--port", str(port), "--log-dir", str(tmp_path)]
    with marked() as mark, running(arguments, log_path, {MARK_VARIABLE: mark}) as process:
        worker_log = tmp_path / f"worker-0.{port}.log"
        wait_for_line(worker_log, "INITIALISED", process)
        os.kill(children(process.pid)["worker"], signal.SIGKILL)
        assert process.wait(30) == 1
    said = log_path.read_text()
    assert "worker 0 was killed by SIGKILL" in said
    assert str(worker_log) in said
    assert "Traceback" not in said


def test_a_worker_that_never_answers_ends_serve_and_is_gone(tiny_model: Path, tmp_path: Path) -> None:
    """vllm #32116: the door gave up after its time, and the engine ran on and held the devices."""
    port, log_path = free_port(), tmp_path / "serve.log"
    flags = ["--port", str(port), "--log-dir", str(tmp_path), "--device=sim", "--worker-timeout=1"]
    with (
        marked() as mark,
        running(["serve", "--model", str(tiny_model), *flags], log_path, {MARK_VARIABLE: mark}) as process,
    ):
        while "worker" not in children(process.pid):
            time.sleep(0.005)
        os.kill(children(process.pid)["worker"], signal.SIGSTOP)
        assert process.wait(60) == 1
    assert re.search(r"no worker answers at 127.0.0.1:\d+ within 1 s .*--worker-timeout", log_path.read_text())


def wait_for_line(path: Path, text: str, process: "subprocess.Popen[bytes]") -> None:
    """Waits until a log holds a text; the test's own timeout bounds it. A process that it depends on must not end."""
    while not path.exists() or text not in path.read_text():
        assert process.poll() is None, f"{path} does not say {text!r}"
        time.sleep(0.005)
