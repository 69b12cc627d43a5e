"""Which format a path is in. Outside packages add theirs by an entry point; each is imported when it is needed."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol

from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError

ENTRY_POINT_GROUP = "stepwire.checkpoint_formats"
# In the order they are asked: those with a sign of their own come before those that take what is left.
_BUILT_IN = (
    ("loader.formats.presliced", "PreslicedFormat"),
    ("loader.formats.trtllm", "TensorRtLlmFormat"),
    ("loader.formats.safetensors", "SafetensorsFormat"),
    ("loader.formats.gguf", "GgufFormat"),
)


class CheckpointFormat(Protocol):
    """A format of checkpoints. An entry point names a class of this kind that is made without arguments."""

    @property
    def name(self) -> str:
        """What `Checkpoint.format` says of it."""

    def recognises(self, path: Path) -> bool:
        """Whether the file or folder, which exists, is meant to be in this format: by names and first bytes alone."""

    def open(self, path: Path) -> Checkpoint:
        """Reads headers only, and checks them. Raises CheckpointError."""


@dataclass(frozen=True, slots=True)
class BrokenFormat:
    """A format of another package that could not be asked, and why."""

    name: str
    package: str
    reason: str

    def __str__(self) -> str:
        return f"the format {self.name!r} of {self.package} could not be used: {self.reason}"


def find_format(path: Path) -> tuple[CheckpointFormat | None, list[BrokenFormat]]:
    """The format of what lies at `path`: one of ours or else, if none of these has it, one of another package.

    With it come the formats of other packages that could not be asked; none of them keeps the others from being asked.
    """
    for module, attribute in _BUILT_IN:
        built_in: CheckpointFormat = getattr(importlib.import_module(module), attribute)()
        if built_in.recognises(path):
            return built_in, []
    broken: list[BrokenFormat] = []
    for entry in _entries():
        try:
            outside: CheckpointFormat = entry.load()()
            if outside.recognises(path):
                return _Outside(outside, _package(entry)), broken
        except CheckpointError:
            raise
        except Exception as error:
            broken.append(BrokenFormat(entry.name, _package(entry), f"{type(error).__name__}: {error}"))
    return None, broken


@dataclass(frozen=True, slots=True)
class _Outside:
    """A format of another package, whose failures are named as its own."""

    inner: CheckpointFormat
    package: str

    @property
    def name(self) -> str:
        return self.inner.name

    def recognises(self, path: Path) -> bool:
        return self.inner.recognises(path)

    def open(self, path: Path) -> Checkpoint:
        try:
            checkpoint = self.inner.open(path)
        except (CheckpointError, OSError, MemoryError):
            raise
        except Exception as error:
            text = f"{path} cannot be opened by the format {self.name!r} of {self.package}: {error!r}"
            raise CheckpointError(
                "unsupported", text, f"update {self.package}, or tell its authors", file=path
            ) from error
        if not isinstance(checkpoint, Checkpoint):
            text = f"{self.package} answered {path} with a {type(checkpoint).__name__}, not a Checkpoint"
            raise CheckpointError("unsupported", text, f"update {self.package}, or tell its authors", file=path)
        return checkpoint


def _entries() -> Iterator[EntryPoint]:
    return iter(sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value.partition(":")[0]
