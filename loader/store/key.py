"""Which weights an entry holds: everything that they depend on, and nothing else. Imports no torch."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loader.checkpoint import Checkpoint
from loader.cpu import cpu_flags
from loader.shares import RankPlace
from loader.tensors import files_of

_MAX_TEXT = 512


@dataclass(frozen=True, slots=True)
class EntryKey:
    """What the packed weights of a rank are a function of.

    `content` names the bytes of the checkpoint (`content_of`), `quantisation` what was done to them at load ("none"),
    `layout` the packed layout, `code` the program that made it, `machine` what its layout was chosen for
    (`cpu_features`, or a device's own name).
    """

    content: str
    place: RankPlace
    dtype: str
    quantisation: str
    layout: str
    code: str
    machine: str

    @property
    def name(self) -> str:
        """32 hexadecimal digits that differ when any part does; the entry's name."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:32]

    def as_json(self) -> dict[str, Any]:
        """The parts, for the header of an entry."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "EntryKey":
        """What `as_json` gave. Raises ValueError for anything else."""
        if not isinstance(value, dict) or not isinstance(value.get("place"), dict):
            raise ValueError("the key is not an object with a place")
        texts = {name: text for name, text in value.items() if name != "place"}
        if not all(isinstance(text, str) and len(text) <= _MAX_TEXT for text in texts.values()):
            raise ValueError("a part of the key is no short text")
        if not all(type(number) is int for number in value["place"].values()):
            raise ValueError("the place is not made of integers")
        try:
            return cls(place=RankPlace(**value["place"]), **texts)
        except TypeError as error:
            raise ValueError(f"the key has other parts: {error}") from error


def content_of(checkpoint: Checkpoint) -> str:
    """A digest that differs when a byte of the checkpoint may differ, made without reading its tensors.

    Beside the checkpoint's fingerprint (headers, configs, sizes, modification times) it takes each file's inode and
    change time: those two also change when other weights of the same shapes are put in place of the old with their
    times kept (`cp -p`, `rsync -t`, archives). An equal copy elsewhere has another digest, and costs a load.
    Raises OSError for a file that is gone.
    """
    digest = hashlib.sha256(checkpoint.fingerprint.encode())
    for path in files_of(checkpoint.tensors.values()):
        status = path.stat()
        parts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        digest.update(os.fsencode(path.name) + b"\0" + repr(parts).encode())
    return digest.hexdigest()


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The architecture and a digest of what this CPU can do, such as "x86_64-3f2a9c01"."""
    flags = " ".join(sorted(cpu_flags(cpuinfo))) if cpuinfo.exists() else platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def code_digest(folders: Mapping[str, Path], version: str) -> str:
    """A version with a digest of all sources and libraries below `folders`, such as "0.1.0-3f2a9c01".

    A version alone stays the same while the code that shapes weights is worked on.
    """
    digest = hashlib.sha256()
    for name, folder in sorted(folders.items()):
        for path in sorted(path for suffix in ("py", "so", "c", "cpp", "h") for path in folder.rglob(f"*.{suffix}")):
            digest.update(f"{name}/{path.relative_to(folder)}\0".encode("utf-8", "surrogateescape"))
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{version}-{digest.hexdigest()[:8]}"
