"""What a path is that no format knows, and what to do about it. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from loader.errors import CheckpointError
from loader.files import NOT_WHAT_IT_IS_NAMED, foreign_kind, read_head

WHAT_TO_PASS = "pass a directory with config.json and safetensors files, or a .gguf file"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def unrecognised(path: Path, broken: Sequence[object]) -> CheckpointError:
    """The error for a file or folder that no format recognises; `broken` are the formats that could not be asked."""
    error = _no_weights(path) if path.is_dir() else _no_checkpoint(path)
    if broken:
        error.remedy = "; ".join([*map(str, broken), error.remedy])[:1000]
    return error


def not_there(path: Path) -> CheckpointError:
    """The error for a path at which there is nothing."""
    if path.is_symlink():
        return CheckpointError("not_found", f"{path} is a link to nothing", "download the model again", file=path)
    remedy = WHAT_TO_PASS
    if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():
        remedy = f"if {path} names a model on a hub, download it first and pass the directory"
    return CheckpointError("not_found", f"{path} does not exist", remedy, file=path)


def _no_checkpoint(path: Path) -> CheckpointError:
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        remedy = f"pass its directory {path.parent}, which also holds the config and the tokenizer"
        return CheckpointError("invalid", f"{path} is one file of a checkpoint", remedy, file=path)
    kind = foreign_kind(read_head(path))
    if kind is not None:
        return CheckpointError("invalid", f"{path} is {kind[0]}", kind[1], file=path, found=kind[0])
    return CheckpointError("invalid", f"{path} is not a checkpoint", WHAT_TO_PASS, file=path)


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
        return CheckpointError("not_found", f"{folder} is empty", WHAT_TO_PASS, file=folder)
    if (folder / "config.json").exists():
        return CheckpointError(
            "not_found", f"{folder} holds a config.json but no weights", "download the safetensors files", file=folder
        )
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    remedy = f"did you mean {inner[0]}?" if inner else WHAT_TO_PASS
    return CheckpointError("not_found", f"{folder} holds no checkpoint", remedy, file=folder)
