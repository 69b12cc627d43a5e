"""Builds the compiled kernels for this machine, once: `python -m worker_service.kernels.build` does so ahead of time.

The library is kept under ${STEPWIRE_CACHE:-~/.cache/stepwire}/kernels, named after all that it depends
on, so another source, compiler, flag or CPU means another file, and none is ever out of date. Whoever builds one
removes those that nobody has used for 30 days; who has one mapped keeps it all the same.

An image, which has no compiler and runs on CPUs that its builder does not know, brings libraries for several levels
of CPUs in the folder that STEPWIRE_KERNELS names: `python -m worker_service.kernels.build --levels FOLDER`.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from loader.cpu import cpu_flags

SOURCES = Path(__file__).parent / "cpu"
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-pthread",
    # Not -ffast-math: sums keep their order, and NaN stays what it is.
    "-fno-math-errno",
    # Vectors wider than the CPU's own are passed between our own functions alone.
    "-Wno-psabi",
)
_TIMEOUT_S = 300.0
_KEEP_UNUSED_S = 30 * 86400.0
_MARK_EVERY_S = 86400.0
# Features without which torch's own kernels are the better choice.
_REQUIRED = {"x86_64": frozenset({"avx2", "fma"}), "aarch64": frozenset({"asimd"})}

# Levels of CPUs that libraries are built for ahead, the best first: by machine, the compiler's name for each and the
# features that it stands for and we use.
_LEVELS: Mapping[str, Sequence[tuple[str, frozenset[str]]]] = {
    "x86_64": (
        ("cooperlake", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"})),
        ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
        ("x86-64-v3", frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma"})),
    ),
    "aarch64": (("armv8.2-a", frozenset({"asimd", "atomics"})), ("armv8-a", frozenset({"asimd"}))),
}

_log = structlog.stdlib.get_logger(__name__)


class BuildError(Exception):
    """Why there is no library, and what to do about it."""


def library_path() -> Path | None:
    """The library for this machine, built if it is not there yet; None, with a line in the log, when it cannot be."""
    ahead = os.environ.get("STEPWIRE_KERNELS")
    try:
        return built_ahead(Path(ahead)) if ahead else build()
    except (BuildError, OSError) as error:
        _log.warning("kernels_unavailable", reason=str(error), consequence="plain torch is used, which is slower")
        return None


def build() -> Path:
    """The library for this machine. Raises BuildError."""
    flags, features = machine_flags()
    compiler = _compiler()
    target = cache_folder() / f"{_fingerprint(compiler, flags, features)}.so"
    if _is_marked_as_used(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent):
        # Workers that start together wait for the first one's build.
        if not target.exists():
            _compile(compiler, flags, target)
        _prune(target.parent)
    return target


def _is_marked_as_used(path: Path) -> bool:
    """Whether a library is there, and is not pruned before it is mapped: the time of its change says when it was used.

    One that was not used for a day is marked under the lock, under which others prune.
    """
    try:
        if time.time() - path.stat().st_mtime > _MARK_EVERY_S:
            with _lock(path.parent):
                os.utime(path)
    except OSError:
        # It is not there; or this user may not write here, and then nor may who would prune as this user.
        return path.exists()
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prune(folder: Path) -> None:
    """Removes libraries that were not used for long, and what builds that were killed have left. Needs the lock."""
    for path in folder.iterdir():
        if path.is_dir() and path.name.startswith(tempfile.gettempprefix()):
            # Of a build that did not end: one that runs would hold the lock.
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == ".so" and time.time() - path.stat().st_mtime > _KEEP_UNUSED_S:
            # Another user's stays: what was just built is there, whatever cannot be removed.
            with contextlib.suppress(OSError):
                path.unlink()
                _log.info("kernels_pruned", path=str(path))


def build_levels(folder: Path) -> list[Path]:
    """Libraries for all levels of this kind of machine, in `folder`. Raises BuildError."""
    compiler, levels = _compiler(), _levels()
    folder.mkdir(parents=True, exist_ok=True)
    for level, _ in levels:
        _compile(compiler, (*_FLAGS, f"-march={level}"), folder / f"{level}.so")
    return [folder / f"{level}.so" for level, _ in levels]


def built_ahead(folder: Path) -> Path:
    """The best library in `folder` that this CPU can run. Raises BuildError."""
    features = cpu_flags()
    for level, needed in _levels():
        path = folder / f"{level}.so"
        if needed <= features and path.exists():
            return path
    raise BuildError(f"{folder} holds no library that this CPU can run")


def _levels() -> Sequence[tuple[str, frozenset[str]]]:
    levels = _LEVELS.get(platform.machine())
    if levels is None:
        raise BuildError(f"there are no kernels for {platform.machine()}")
    return levels


def cache_folder() -> Path:
    """Where libraries are kept."""
    root = os.environ.get("STEPWIRE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "stepwire") / "kernels"


def machine_flags() -> tuple[tuple[str, ...], frozenset[str]]:
    """Compiler flags for this CPU, and its features. Raises BuildError for one that is not served."""
    machine, features = platform.machine(), cpu_flags()
    required = _REQUIRED.get(machine)
    if required is None:
        raise BuildError(f"there are no kernels for {machine}")
    if not required <= features:
        raise BuildError(f"the CPU lacks {', '.join(sorted(required - features))}")
    native = "-march=native" if machine == "x86_64" else "-mcpu=native"
    return (*_FLAGS, native), features


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    began = time.monotonic()
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # One process a source: they compile at the same time.
        objects = [str(Path(folder) / f"{Path(source).stem}.o") for source in sources]
        commands = [
            [compiler, *flags, "-c", source, "-o", output] for source, output in zip(sources, objects, strict=True)
        ]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        try:
            for process in processes:
                _finish(process, began)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        partial = Path(folder) / "library.so"
        _finish(subprocess.Popen([compiler, *flags, *objects, "-o", partial], stderr=subprocess.PIPE, text=True), began)
        partial.rename(target)
    _log.info("kernels_built", path=str(target), seconds=round(time.monotonic() - began, 1))


def _finish(process: "subprocess.Popen[str]", began: float) -> None:
    try:
        _, errors = process.communicate(timeout=max(1.0, _TIMEOUT_S - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BuildError(f"the compiler did not end within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise BuildError(f"the compiler failed with status {process.returncode}: {errors[:2000].strip()}")


def _compiler() -> str:
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(f"there is no compiler {wanted!r}: install g++ 11 or later, or set CXX")
    return found


def _fingerprint(compiler: str, flags: tuple[str, ...], features: frozenset[str]) -> str:
    # The compiler's file stands for its version: to ask it would cost a process at every start.
    stat = Path(compiler).resolve().stat()
    digest = hashlib.sha256(repr((compiler, stat.st_size, stat.st_mtime_ns, flags, sorted(features))).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def main(arguments: Sequence[str]) -> int:
    """Builds, and prints where the library lies; without a compiler says so, and is content."""
    if arguments[:1] == ["--levels"] and len(arguments) == 2:
        for built in build_levels(Path(arguments[1])):
            print(built)  # noqa: T201 - a command's output
        return 0
    path = library_path()
    print(path if path else "kernels: not built, plain torch will be used")  # noqa: T201 - a command's output
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
