"""The safetensors files of a checkpoint directory: one file, shards with an index, or complete shards without."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from loader.errors import CheckpointError
from loader.files import read_json_object
from loader.safetensors_format import SafetensorsFile, read_safetensors_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<total>\d{5,6})\.safetensors")
_SLICED = re.compile(r"(model-rank-\d+-part-\d+|rank\d+)\.safetensors")


def find_safetensors(folder: Path) -> list[SafetensorsFile] | None:
    """Reads the headers of the files that make up the checkpoint in `folder`; None when it has no such files.

    An index decides alone which files belong; consolidated files, which hold the same weights under other names,
    never do. Raises CheckpointError.
    """
    index = _find_index(folder)
    if index is not None:
        return _read_indexed(folder, index)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    usable = [name for name in names if not name.startswith("consolidated")]
    if not usable:
        if names:
            raise CheckpointError(
                "unsupported",
                f"{folder} holds only {names[0]}, which uses the names of another format",
                "download the files named model*.safetensors too",
                file=folder / names[0],
            )
        return None
    sliced = [name for name in usable if _SLICED.fullmatch(name)]
    if sliced and SINGLE_NAME not in usable:
        raise CheckpointError(
            "unsupported",
            f"{folder} holds weights sliced for the ranks of another engine ({sliced[0]})",
            "use the checkpoint they were made from",
            file=folder / sliced[0],
            expected="whole tensors",
            found="slices of one rank",
        )
    chosen = [SINGLE_NAME] if SINGLE_NAME in usable else usable
    if len(chosen) > 1 or _SHARD.fullmatch(chosen[0]):
        _check_complete(folder, chosen)
    files = [read_safetensors_file(folder / name) for name in chosen]
    _check_disjoint(files)
    return files


def _find_index(folder: Path) -> Path | None:
    preferred = folder / INDEX_NAME
    if preferred.exists():
        return preferred
    others = sorted(
        path for path in folder.glob("*.safetensors.index.json") if not path.name.startswith("consolidated")
    )
    return others[0] if len(others) == 1 else None


def _read_indexed(folder: Path, index: Path) -> list[SafetensorsFile]:
    content = read_json_object(index)
    weight_map = _checked_weight_map(index, content.get("weight_map"))
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            "not_found",
            f"{len(missing)} of the {len(names)} files that {index} names are missing: {_some(missing)}",
            "download the missing files",
            file=folder / missing[0],
            expected=f"{len(names)} files",
            found=f"{len(names) - len(missing)} files",
        )
    files = [read_safetensors_file(folder / name) for name in names]
    _check_disjoint(files)
    _check_map(index, weight_map, dict(zip(names, files, strict=True)))
    _check_total_size(index, content.get("metadata"), files)
    return files


def _checked_weight_map(index: Path, weight_map: object) -> Mapping[str, str]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "invalid", f"{index} has no weight_map", "download the file again", file=index, expected="weight_map"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or "\0" in name:
            raise CheckpointError(
                "invalid",
                f"{index} maps tensor {tensor!r} to {name!r}, which is no relative file name",
                "download the file again",
                file=index,
                tensor=tensor,
            )
        if ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                "invalid",
                f"{index} maps tensor {tensor!r} to {name!r}, outside the checkpoint",
                "do not use this checkpoint",
                file=index,
                tensor=tensor,
            )
    return weight_map


def _check_map(index: Path, weight_map: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> None:
    located = {tensor.name: name for name, file in files.items() for tensor in file.tensors}
    for tensor, name in weight_map.items():
        if located.get(tensor) != name:
            raise CheckpointError(
                "invalid",
                f"{index} says that {name} holds tensor {tensor!r}, and it does not",
                "download index and shards again, from one revision",
                file=index.parent / name,
                tensor=tensor,
                expected=name,
                found=located.get(tensor, "nowhere"),
            )
    unmapped = [tensor for tensor in located if tensor not in weight_map]
    if unmapped:
        raise CheckpointError(
            "invalid",
            f"{index} does not name {len(unmapped)} tensors that its files hold: {_some(unmapped)}",
            "download index and shards again, from one revision",
            file=index.parent / located[unmapped[0]],
            tensor=unmapped[0],
        )


def _check_total_size(index: Path, metadata: object, files: Iterable[SafetensorsFile]) -> None:
    announced = metadata.get("total_size") if isinstance(metadata, dict) else None
    if announced is None:
        return
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    if announced != total:
        raise CheckpointError(
            "invalid",
            f"{index} announces {announced} bytes of tensors, and its files hold {total}",
            "download index and shards again, from one revision",
            file=index,
            expected=str(announced),
            found=str(total),
        )


def _check_complete(folder: Path, names: list[str]) -> None:
    """Shards without an index must be numbered 1 to N of N."""
    matches = [match for match in map(_SHARD.fullmatch, names) if match is not None]
    totals = {(match["stem"], int(match["total"])) for match in matches}
    if len(matches) != len(names) or len(totals) != 1:
        raise CheckpointError(
            "invalid",
            f"{folder} holds {len(names)} safetensors files ({_some(names)}) and no {INDEX_NAME} that joins them",
            f"download {INDEX_NAME}",
            file=folder / INDEX_NAME,
        )
    total = totals.pop()[1]
    missing = sorted(set(range(1, total + 1)) - {int(match["number"]) for match in matches})
    if missing or len(names) != total:
        raise CheckpointError(
            "not_found",
            f"{folder} holds {len(names)} of {total} shards"
            + (f"; number {missing[0]} is missing" if missing else ", some under two names"),
            "download the missing files",
            file=folder,
            expected=f"{total} files",
            found=f"{len(names)} files",
        )


def _check_disjoint(files: Iterable[SafetensorsFile]) -> None:
    seen: dict[str, Path] = {}
    for file in files:
        for tensor in file.tensors:
            other = seen.setdefault(tensor.name, file.path)
            if other != file.path:
                raise CheckpointError(
                    "invalid",
                    f"tensor {tensor.name!r} is in both {other} and {file.path}",
                    "keep the files of one revision only",
                    file=file.path,
                    tensor=tensor.name,
                )


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, and {len(names) - limit} more"
