"""Entries of a restart store for tests, and processes that have them in use."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from loader.shares import RankPlace
from loader.store.folder import Limits, StoreFolder
from loader.store.key import EntryKey
from loader.store.tensors import write_entry

KEY = EntryKey("c" * 64, RankPlace(), "bfloat16", "none", "plain-1", "0.1.0-12345678", "x86_64-abcdef01")
NO_LIMITS = Limits(None, lambda: 1 << 50)


def key(**parts: Any) -> EntryKey:
    """A key that differs from KEY in these parts."""
    return replace(KEY, **parts)


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each kind there is: types of all widths, odd sizes, a scalar, an empty one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "float32": draw(3, 5),
        "bfloat16": draw(7, 11).bfloat16(),
        "float16": draw(13).half(),
        "int8": (draw(5, 3) * 50).to(torch.int8),
        "uint8": (draw(17) * 50).to(torch.uint8),
        "int32": (draw(2, 3, 4) * 1e6).to(torch.int32),
        "int64": (draw(9) * 1e6).to(torch.int64),
        "float8_e4m3fn": draw(6, 7).to(torch.float8_e4m3fn),
        "float8_e5m2": draw(6, 7).to(torch.float8_e5m2),
        "bool": draw(19) > 0,
        "scalar": draw(1).reshape(()),
        "empty": torch.empty(0, 4),
    }


def write(
    folder: StoreFolder,
    key: EntryKey,
    tensors: dict[str, torch.Tensor],
    limits: Limits = NO_LIMITS,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Makes an entry; answers the bytes of its file."""
    return write_entry(folder, key, tensors, model="/models/m", limits=limits, progress=progress)


@contextmanager
def python_process(
    code: str, *arguments: str, prefix: Sequence[str] = (), stderr: IO[str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """A process that runs `code`, has printed "ready", and reads a line before it ends; killed afterwards.

    `prefix` is a command that becomes it.
    """
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


HOLD = """
import sys
from pathlib import Path
from loader.store.folder import StoreFolder
from loader.store.mapping import map_entry
with StoreFolder(Path(sys.argv[1]), create=False) as folder:
    entry = map_entry(folder, sys.argv[2], num_threads=1)
    assert entry is not None
    print("ready", flush=True)
    sys.stdin.readline()
"""
"""Maps the entry argv[2] of the store argv[1] until it is killed."""
