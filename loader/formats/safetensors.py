"""Hugging Face's layout: config.json and safetensors files, one, or several with an index."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from loader.checkpoint import Checkpoint, FileFacts, fingerprint
from loader.completeness import check_tensors, is_unused
from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.files import read_small
from loader.foreign import refuse_foreign_tensors
from loader.hf_config import DTYPES, read_hf_config
from loader.hf_other import with_tensors
from loader.quantised.binding import QUANTISATION_FILES, quantised_config, stated_quantisation
from loader.safetensors_format import SafetensorsFile
from loader.safetensors_set import find_safetensors
from loader.stored_names import logical_tensors
from loader.tensors import TensorInfo

STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONFIG_NAMES = ("config.json", "generation_config.json", *QUANTISATION_FILES)


class SafetensorsFormat:
    """A folder with config.json and safetensors files."""

    name = "safetensors"

    def recognises(self, path: Path) -> bool:
        """Whether the folder holds safetensors files, or an index of such."""
        return path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")))

    def open(self, path: Path) -> Checkpoint:
        """Reads config and headers, and holds the tensors against the config. Raises CheckpointError."""
        files = find_safetensors(path)
        if not files:
            text = f"{path} holds an index and no weights"
            raise CheckpointError("not_found", text, "download the safetensors files", file=path)
        if not (path / "config.json").exists():
            raise _no_config(path)
        tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
        config = with_tensors(read_hf_config(path, stored_dtype(tensors)), tensors)
        stated = stated_quantisation(path)
        refuse_foreign_tensors(tensors, quantised=stated is not None)
        tensors = logical_tensors(config, tensors)
        if stated is not None:
            config = quantised_config(config, stated, tensors)
        check_tensors(path, config, tensors)
        refuse_foreign_types(tensors, config)
        return Checkpoint(
            path=path,
            format=self.name,
            config=config,
            tensors=tensors,
            total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
            fingerprint=fingerprint(map(file_facts, files), read_configs(path)),
            gguf_metadata={},
        )


def file_facts(file: SafetensorsFile) -> FileFacts:
    """What identifies the content of a safetensors file."""
    return FileFacts(file.path, file.num_bytes, file.mtime_ns, file.header_sha256)


def read_configs(folder: Path, names: tuple[str, ...] = _CONFIG_NAMES) -> list[tuple[str, bytes]]:
    """Those of the named small files that are there, with their content."""
    return [(name, read_small(folder / name)) for name in names if (folder / name).exists()]


def stored_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The type most bytes are stored in, of those that unquantised weights are stored in."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in STORED_DTYPES:
            sizes[tensor.dtype] += tensor.num_bytes
    return STORED_DTYPES.get(sizes.most_common(1)[0][0] if sizes else "", "bfloat16")


def refuse_foreign_types(tensors: Mapping[str, TensorInfo], config: ModelConfig | None = None) -> None:
    """Raises CheckpointError "unsupported" at the first tensor stored in a type that is none of the model's.

    Those that `config` says belong to quantised weights, or to layers that are not used, have types of their own.
    """
    quantised = () if config is None or config.quantisation is None else config.quantisation.schemes
    for tensor in tensors.values():
        product, _, part = tensor.name.rpartition(".")
        if (part != "bias" and product in quantised) or (config is not None and is_unused(tensor.name, config)):
            continue
        if tensor.dtype not in STORED_DTYPES:
            raise CheckpointError(
                "unsupported",
                f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.dtype}",
                f"use a model stored as one of {', '.join(DTYPES)}",
                file=tensor.file,
                tensor=tensor.name,
                expected=", ".join(STORED_DTYPES),
                found=tensor.dtype,
            )


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
