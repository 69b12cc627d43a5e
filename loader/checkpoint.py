"""Opening a checkpoint: everything that can be known, and checked, from headers. Imports no torch."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loader.completeness import check_tensors
from loader.config import ModelConfig
from loader.errors import CheckpointError, unreadable
from loader.files import NOT_WHAT_IT_IS_NAMED, foreign_kind, read_head, read_small
from loader.foreign import refuse_foreign_tensors
from loader.gguf_format import GgufFile, MetadataValue, read_gguf_file
from loader.gguf_model import gguf_config, gguf_tensors
from loader.hf_config import DTYPES, read_hf_config
from loader.safetensors_format import SafetensorsFile
from loader.safetensors_set import find_safetensors
from loader.tensors import TensorInfo

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONFIG_NAMES = ("config.json", "generation_config.json")
_WHAT_TO_PASS = "pass a directory with config.json and safetensors files, or a .gguf file"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint; no tensor data has been read.

    `tensors` are under Hugging Face names, `total_bytes` is their size as stored. `fingerprint` (hex SHA-256) names
    the content: it covers each file's name, size, time of change and header, and the config. `gguf_metadata` is
    empty for safetensors.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    config: ModelConfig
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    total_bytes: int
    fingerprint: str
    gguf_metadata: Mapping[str, MetadataValue] = field(repr=False)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a directory with config.json and safetensors, a .gguf file, or a directory with exactly one .gguf.

    Reads headers only, and holds the tensors against the config: what it returns can be loaded. Raises
    CheckpointError: "not_found" for files that are missing, "invalid" for files that are damaged or do not fit
    together, "unsupported" for what is sound but not for us.
    """
    try:
        path = path.expanduser()
        if path.is_dir():
            return _open_folder(path)
        if path.is_file():
            return _open_file(path)
        if path.exists():
            raise CheckpointError("invalid", f"{path} is neither a file nor a directory", _WHAT_TO_PASS, file=path)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RuntimeError) as error:  # a NUL in the path; "~" without a home
        raise CheckpointError("not_found", f"{str(path)!r} is no usable path: {error}", _WHAT_TO_PASS) from error
    raise _not_there(path)


def _not_there(path: Path) -> CheckpointError:
    if path.is_symlink():
        return CheckpointError("not_found", f"{path} is a link to nothing", "download the model again", file=path)
    remedy = _WHAT_TO_PASS
    if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():
        remedy = f"if {path} names a model on a hub, download it first and pass the directory"
    return CheckpointError("not_found", f"{path} does not exist", remedy, file=path)


def _open_file(path: Path) -> Checkpoint:
    head = read_head(path)
    if head.startswith(b"GGUF") or path.suffix == ".gguf":
        return _from_gguf(path)
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        remedy = f"pass its directory {path.parent}, which also holds the config and the tokenizer"
        raise CheckpointError("invalid", f"{path} is one file of a checkpoint", remedy, file=path)
    kind = foreign_kind(head)
    if kind is not None:
        raise CheckpointError("invalid", f"{path} is {kind[0]}", kind[1], file=path, found=kind[0])
    raise CheckpointError("invalid", f"{path} is not a checkpoint", _WHAT_TO_PASS, file=path)


def _open_folder(folder: Path) -> Checkpoint:
    ggufs = sorted(folder.glob("*.gguf"))
    files = find_safetensors(folder)
    if files is not None:
        if not (folder / "config.json").exists():
            raise _no_config(folder)
        return _from_safetensors(folder, files)
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0])
    if ggufs:
        names = ", ".join(gguf.name for gguf in ggufs[:5])
        raise CheckpointError(
            "invalid", f"{folder} holds {len(ggufs)} GGUF files: {names}", "pass the path of one of them", file=folder
        )
    raise _no_weights(folder)


def _no_config(folder: Path) -> CheckpointError:
    if (folder / "adapter_config.json").exists():
        return CheckpointError(
            "unsupported", f"{folder} is a LoRA adapter, not a model", "pass the base model", file=folder
        )
    return CheckpointError(
        "not_found",
        f"{folder} holds safetensors files but no config.json",
        "download the model's config.json too",
        file=folder / "config.json",
    )


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        kind = foreign_kind(read_head(pickles[0]))
        if kind is not None and kind[0] in NOT_WHAT_IT_IS_NAMED:
            return CheckpointError("invalid", f"{pickles[0]} is {kind[0]}", kind[1], file=pickles[0], found=kind[0])
        convert = (
            'python -c "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
            "M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2]); "
            f'T.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])" {folder} {folder}-safetensors'
        )
        return CheckpointError(
            "unsupported",
            f"{folder} holds only pickled weights ({pickles[0].name}), which can run code when they are loaded",
            f"if you trust them, convert them once: {convert}",
            file=pickles[0],
            expected="safetensors or GGUF",
        )
    if next(folder.iterdir(), None) is None:
        return CheckpointError("not_found", f"{folder} is empty", _WHAT_TO_PASS, file=folder)
    if (folder / "config.json").exists():
        return CheckpointError(
            "not_found", f"{folder} holds a config.json but no weights", "download the safetensors files", file=folder
        )
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    remedy = f"did you mean {inner[0]}?" if inner else _WHAT_TO_PASS
    return CheckpointError("not_found", f"{folder} holds no checkpoint", remedy, file=folder)


def _from_safetensors(folder: Path, files: Iterable[SafetensorsFile]) -> Checkpoint:
    files = list(files)
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    config = read_hf_config(folder, _stored_dtype(tensors))
    refuse_foreign_tensors(tensors)
    check_tensors(folder, config, tensors)
    for tensor in tensors.values():
        if tensor.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                "unsupported",
                f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.dtype}",
                f"use a model stored as one of {', '.join(DTYPES)}",
                file=tensor.file,
                tensor=tensor.name,
                expected=", ".join(_STORED_DTYPES),
                found=tensor.dtype,
            )
    configs = [(name, read_small(folder / name)) for name in _CONFIG_NAMES if (folder / name).exists()]
    return Checkpoint(
        path=folder,
        format="safetensors",
        config=config,
        tensors=tensors,
        total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        fingerprint=_fingerprint(files, configs),
        gguf_metadata={},
    )


def _from_gguf(path: Path) -> Checkpoint:
    file = read_gguf_file(path)
    config = gguf_config(file)
    tensors = gguf_tensors(file, config)
    check_tensors(path, config, tensors)
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        tensors=tensors,
        total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        fingerprint=_fingerprint([file], []),
        gguf_metadata=file.metadata,
    )


def _stored_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The type most bytes are stored in."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    return _STORED_DTYPES.get(sizes.most_common(1)[0][0] if sizes else "", "bfloat16")


def _fingerprint(files: Iterable[SafetensorsFile | GgufFile], configs: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path.name}\0{file.num_bytes}\0{file.mtime_ns}\0".encode())
        digest.update(file.header_sha256)
    for name, content in configs:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
