"""GGUF: one file, or the parts that llama-gguf-split makes of one."""

import re
from dataclasses import replace
from pathlib import Path

from loader.checkpoint import Checkpoint, FileFacts, fingerprint
from loader.completeness import check_tensors
from loader.errors import CheckpointError
from loader.files import read_head
from loader.gguf_format import GgufFile, read_gguf_file
from loader.gguf_model import gguf_config
from loader.gguf_names import gguf_tensors
from loader.gguf_rope import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from loader.tensors import TensorInfo

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_ROPE_NAMES = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
_MAX_PARTS = 10_000


class GgufFormat:
    """A GGUF file, or a folder that holds one."""

    name = "gguf"

    def recognises(self, path: Path) -> bool:
        """Whether the file begins or ends like a GGUF, or the folder holds such."""
        if path.is_dir():
            return any(path.glob("*.gguf"))
        return path.suffix == ".gguf" or read_head(path).startswith(b"GGUF")

    def open(self, path: Path) -> Checkpoint:
        """Reads the headers, and holds the tensors against the metadata. Raises CheckpointError."""
        first = _only_one(path) if path.is_dir() else path
        files = _all_parts(first)
        metadata = {key: value for key, value in files[0].metadata.items() if not key.startswith("split.")}
        whole = replace(
            files[0],
            path=_with_rope(files).path,
            metadata=metadata,
            tensors=tuple(tensor for file in files for tensor in file.tensors),
        )
        config = gguf_config(whole)
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, tensor in gguf_tensors(replace(file, metadata=metadata), config).items():
                if name in tensors:
                    raise _twice(tensors[name], tensor)
                tensors[name] = tensor
        check_tensors(files[0].path, config, tensors)
        return Checkpoint(
            path=files[0].path,
            format=self.name,
            config=config,
            tensors=tensors,
            total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
            fingerprint=fingerprint((FileFacts(f.path, f.num_bytes, f.mtime_ns, f.header_sha256) for f in files), []),
            gguf_metadata=metadata,
        )


def _only_one(folder: Path) -> Path:
    ggufs = sorted(folder.glob("*.gguf"))
    matches = [_PART.fullmatch(gguf.name) for gguf in ggufs]
    stems = {match["stem"] if match else gguf.name for gguf, match in zip(ggufs, matches, strict=True)}
    if len(stems) == 1:
        return ggufs[0]
    names = ", ".join(gguf.name for gguf in ggufs[:5])
    raise CheckpointError(
        "invalid", f"{folder} holds {len(ggufs)} GGUF files: {names}", "pass the path of one of them", file=folder
    )


def _with_rope(files: list[GgufFile]) -> GgufFile:
    """The part with the tensors that belong to the config, which are read from there; the first where none has any.

    Raises CheckpointError where several have some.
    """
    found = [file for file in files if any(tensor.name in _ROPE_NAMES for tensor in file.tensors)]
    if len(found) > 1:
        raise CheckpointError(
            "unsupported",
            f"the rotary factors of {files[0].path.name} lie in {len(found)} of its parts",
            "join the parts with `llama-gguf-split --merge FIRST-PART OUTPUT.gguf`",
            file=found[1].path,
        )
    return found[0] if found else files[0]


def _all_parts(path: Path) -> list[GgufFile]:
    """The file, or every part of what it is a part of, in order. Only the first part has the model's metadata."""
    file = read_gguf_file(path)
    count = file.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [file]
    match = _PART.fullmatch(path.name)
    if match is None or int(match["total"]) != count or count > _MAX_PARTS:
        raise CheckpointError(
            "invalid",
            f"{path} is one of {count} parts of a GGUF, and its name does not say which",
            "give the parts the names they were published with, or join them with `llama-gguf-split --merge`",
            file=path,
            expected=f"a name that ends in -00001-of-{count:05}.gguf",
            found=path.name,
        )
    paths = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part for part in paths if not part.exists()]
    if missing:
        raise CheckpointError(
            "not_found",
            f"{len(missing)} of the {count} parts of {path.name} are missing: {missing[0].name}",
            "download the missing parts",
            file=missing[0],
            expected=f"{count} files",
            found=f"{count - len(missing)} files",
        )
    parts = [file if part == path else read_gguf_file(part) for part in paths]
    for number, part in enumerate(parts):
        # Parts are counted from 0 inside, and from 1 in their names.
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise CheckpointError(
                "invalid",
                f"{part.path} says that it is part {part.metadata.get('split.no')} of "
                f"{part.metadata.get('split.count')}, counted from 0",
                "download the parts again, from one revision",
                file=part.path,
                expected=f"part {number} of {count}",
            )
    _check_count(parts)
    return parts


def _check_count(parts: list[GgufFile]) -> None:
    announced, total = parts[0].metadata.get("split.tensors.count"), sum(len(part.tensors) for part in parts)
    if announced is not None and announced != total:
        raise CheckpointError(
            "invalid",
            f"{parts[0].path} announces {announced} tensors, and its parts hold {total}",
            "download the parts again, from one revision",
            file=parts[0].path,
            expected=str(announced),
            found=str(total),
        )


def _twice(first: TensorInfo, second: TensorInfo) -> CheckpointError:
    return CheckpointError(
        "invalid",
        f"tensor {first.stored_name!r} is in both {first.file} and {second.file}",
        "download the parts again, from one revision",
        file=second.file,
        tensor=first.name,
    )
