"""Building the library, with a stand-in for the compiler, and what happens where it cannot be built."""

import fcntl
import os
import platform
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker_service.kernels import abi, build, native


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its output, and a line for each call."""
    path, calls = tmp_path / "compiler", tmp_path / "calls"
    path.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\necho built > "$last"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return calls


def test_builds_once_however_many_ask(cache: Path, compiler: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.build())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and found[0].parent == cache
    num_sources = len(list(build.SOURCES.glob("*.cpp")))
    assert len(compiler.read_text().splitlines()) == num_sources + 1
    assert sorted(path.name for path in cache.iterdir()) == sorted([found[0].name, "build.lock"])


def test_another_source_is_another_library(cache: Path, compiler: Path, sources: Path) -> None:
    first = build.build()
    changed(sources, "int two;")
    assert build.build() != first


def aged(path: Path, days: float) -> Path:
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    return path


def changed(sources: Path, text: str) -> None:
    (sources / "one.cpp").write_text(text)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cpu"
    folder.mkdir()
    changed(folder, "int one;")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.mark.usefixtures("compiler")
def test_a_build_removes_what_was_not_used_for_long(cache: Path, sources: Path) -> None:
    old, recent = build.build(), cache / "recent.so"
    recent.write_text("built")
    aged(recent, 29)
    with aged(old, 31).open("rb") as still_open:
        left = cache / "tmpkilled"
        left.mkdir()
        (left / "one.o").write_text("part")
        other = cache / "notes.txt"
        other.write_text("not ours")
        aged(other, 100)
        changed(sources, "int two;")
        new = build.build()
        assert sorted(cache.iterdir()) == sorted([recent, new, other, cache / "build.lock"])
        # Whoever has it mapped or open keeps it.
        assert still_open.read() == b"built\n"


@pytest.mark.usefixtures("compiler")
def test_what_is_used_is_kept(cache: Path, sources: Path) -> None:
    used = aged(build.build(), 31)
    assert build.build() == used
    changed(sources, "int two;")
    build.build()
    assert used.exists()


@pytest.mark.usefixtures("compiler", "sources")
def test_a_library_that_goes_while_its_user_waits_is_built_again(cache: Path) -> None:
    library = aged(build.build(), 31)
    with (cache / "build.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as users:
            found = users.submit(build.build)
            wait_for_lock(cache / "build.lock")
            library.unlink()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert found.result(timeout=60) == library
    assert library.exists()


def wait_for_lock(path: Path) -> None:
    """Returns when somebody waits for a lock on this file."""
    inode = f":{path.stat().st_ino} "
    while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
        time.sleep(0.001)


@pytest.mark.usefixtures("compiler", "sources")
def test_a_cache_that_cannot_be_written_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    library = aged(build.build(), 31)

    def refused(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(build.os, "utime", refused)
    assert build.build() == library


@pytest.mark.usefixtures("compiler")
def test_what_cannot_be_removed_fails_no_build(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = aged(build.build(), 31)

    def refused(_path: Path) -> None:
        raise PermissionError("another user's")

    monkeypatch.setattr(Path, "unlink", refused)
    changed(sources, "int two;")
    assert build.build().exists() and old.exists()


def test_a_compiler_that_fails_leaves_nothing_and_says_why(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(build.BuildError, match="status 3: no such flag"):
        build.build()
    assert [path.name for path in cache.iterdir()] == ["build.lock"]
    assert build.library_path() is None
    assert "kernels_unavailable" in capsys.readouterr().out


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="install g\\+\\+"):
        build.build()


def test_cpus_that_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse4_2", "fma"}))
    with pytest.raises(build.BuildError, match="lacks avx2"):
        build.machine_flags()
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(build.BuildError, match="riscv64"):
        build.machine_flags()


def test_the_library_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("STEPWIRE_NATIVE_KERNELS", "0")
    assert native.load() is None
    native.load.cache_clear()


def test_structures_are_as_long_as_the_headers_say() -> None:
    # 7 pointers and 10 words; 20 pointers and two words; and so on, see cpu/api.h.
    sizes = {
        abi.Quantised: 7 * 8 + 10 * 4,
        abi.Layer: 20 * 8 + 8,
        abi.Model: 18 * 4 + 7 * 8,
        abi.Batch: 8 + 8 * 8,
        abi.Head: 5 * 8,
        abi.Factors: 2 * 8 + 8,
        abi.Run: 8 + 8,
    }
    for structure, size in sizes.items():
        assert abi.ctypes.sizeof(structure) == size


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ("avx2 fma bmi1 bmi2 f16c", "x86-64-v3"),
        ("avx2 fma bmi1 bmi2 f16c avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v4"),
        ("avx2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 avx512_vnni", "cooperlake"),
        ("sse2", None),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_an_image_brings_a_library_for_each_level(
    features: str, level: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(features.split()))
    assert build.main(["--levels", str(tmp_path / "kernels")]) == 0
    monkeypatch.setenv("STEPWIRE_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setenv("CXX", "no compiler")
    path = build.library_path()
    assert path == (None if level is None else tmp_path / "kernels" / f"{level}.so")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None or platform.machine() != "x86_64", reason="no g++ for x86-64")
@pytest.mark.parametrize("source", sorted(build.SOURCES.glob("*.cpp")), ids=lambda path: path.stem)
def test_the_sources_need_no_instructions_of_one_kind_of_cpu(source: Path) -> None:
    """As on other machines than x86-64, on which nothing includes what x86 intrinsics bring along."""
    flags = ("-std=c++20", "-Wall", "-Werror", "-Wno-psabi", "-fsyntax-only", "-march=x86-64")
    done = subprocess.run(["g++", *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
