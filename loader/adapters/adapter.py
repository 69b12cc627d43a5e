"""Opening a PEFT LoRA adapter: everything that can be known, and checked against its base, from headers.

Imports no torch.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loader.adapters import names
from loader.adapters.config import CONFIG_NAME, MERGE_WITH_PEFT, LoraConfig, read_lora_config, unsupported
from loader.adapters.contents import (
    CHECK_BASE,
    LoraModule,
    Stored,
    invalid,
    refuse_rest,
    take_full_weights,
    take_module,
)
from loader.adapters.names import parse_names
from loader.adapters.targets import EMBEDDING, HEAD, Target, TrainedModule, find_targets, is_saved_by, trained_modules
from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.files import open_regular, read_exactly
from loader.safetensors_format import SafetensorsFile, read_safetensors_file
from loader.tensors import TensorInfo

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"
_DTYPES = ("F32", "F16", "BF16")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter of `base`; no tensor data has been read.

    `full_weights` are stored weights, by the name of the base's tensor that each takes the place of.
    """

    path: Path
    base: ModelConfig
    config: LoraConfig = field(repr=False)
    weights: SafetensorsFile = field(repr=False)
    modules: Mapping[str, LoraModule] = field(repr=False)
    full_weights: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def weights_file(self) -> Path:
        """The file of its tensors."""
        return self.weights.path

    @contextmanager
    def open_weights(self) -> Iterator[int]:
        """Yields a descriptor of that file. Raises CheckpointError where it is, or comes to be, another than was
        opened: a trainer may write the next adapter to the same place."""
        with open_regular(self.weights_file) as (descriptor, status):
            self._check_unchanged(status)
            yield descriptor
            self._check_unchanged(os.fstat(descriptor))

    def _check_unchanged(self, status: os.stat_result) -> None:
        if (status.st_size, status.st_mtime_ns) != (self.weights.num_bytes, self.weights.mtime_ns):
            raise CheckpointError(
                "invalid",
                f"{self.weights_file} changed after it was opened",
                "wait until it is written, then load it again",
                file=self.weights_file,
            )

    @property
    def max_rank(self) -> int:
        """The largest rank of its modules."""
        return max(module.rank for module in self.modules.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all its tensors, as stored."""
        factors = (info for module in self.modules.values() for info in (module.a, module.b))
        # Modules that the family joins have one first factor together.
        stored = {info.offset: info.num_bytes for info in (*factors, *self.full_weights.values())}
        return sum(stored.values())


def open_adapter(path: Path, base: ModelConfig, *, max_rank: int | None = None) -> Adapter:
    """Opens the directory of a PEFT LoRA adapter and holds it against the model it is to change.

    Reads the config and the header of the weights only. Raises CheckpointError: "not_found" for files that are
    missing; "invalid" for what is damaged, does not fit together or does not fit the base: a module that is not there
    or has other shapes, a tensor that is missing or without use, a config that matches no module; "unsupported" for
    adapters that compute something else, and for a rank above `max_rank`.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise _not_an_adapter(path)
    config = read_lora_config(path)
    modules = trained_modules(base)
    if not any(module.is_linear for module in modules.values()):
        what = f"is for a {base.architecture}, whose modules are not known here: adapters of such a model"
        raise unsupported(config.file, what, MERGE_WITH_PEFT, base.architecture)
    _check_biases(config, modules)
    targets = find_targets(config, modules)
    if not targets:
        raise _no_module_matches(config, modules)
    _check_ranks(config, targets, max_rank)
    file = _find_weights(path)
    weights = read_safetensors_file(file)
    stored = parse_names(weights.tensors)
    for info in stored.values():
        if info.dtype not in _DTYPES:
            raise invalid(info, f"is stored as {info.dtype}", "save the adapter in one of these", ", ".join(_DTYPES))
    if base.tie_word_embeddings:
        _check_tied(config, targets, stored)
    found = {
        lora.name: lora for name, target in targets.items() for lora in take_module(file, target, modules[name], stored)
    }
    full_weights = take_full_weights(file, config, modules, stored)
    refuse_rest(modules, stored)
    return Adapter(path, base, config, weights, found, full_weights)


def adapter_fingerprint(adapter: Adapter) -> str:
    """What names the adapter's content: a hex SHA-256 of the bytes of config and weights.

    Reads the whole file of weights. KV blocks computed with one content must never be taken for those of another,
    whatever the adapters are called. Raises CheckpointError for a file that cannot be read or has changed.
    """
    with adapter.open_weights() as descriptor:
        return content_fingerprint(adapter.config, descriptor)


def content_fingerprint(config: LoraConfig, descriptor: int) -> str:
    """The same for an open file of weights."""
    digest = hashlib.sha256()
    digest.update(len(config.content).to_bytes(8, "little"))
    digest.update(config.content)
    offset = 0
    while chunk := read_exactly(descriptor, _CHUNK_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def _not_an_adapter(path: Path) -> CheckpointError:
    remedy = f"pass a directory with {CONFIG_NAME} and {WEIGHTS_NAME}"
    if path.exists():
        return CheckpointError("invalid", f"{path} is no directory", remedy, file=path)
    return CheckpointError("not_found", f"{path} does not exist", remedy, file=path)


def _find_weights(folder: Path) -> Path:
    file, pickle = folder / WEIGHTS_NAME, folder / _PICKLE_NAME
    if file.exists():
        return file
    if not pickle.exists():
        raise CheckpointError(
            "not_found", f"{folder} has no {WEIGHTS_NAME}", "download the adapter's weights too", file=file
        )
    convert = (
        'python -c "import sys, torch; from safetensors.torch import save_file; '
        "save_file({name: tensor.contiguous() for name, tensor in "
        f'torch.load(sys.argv[1], weights_only=True).items()}}, sys.argv[2])" {pickle} {file}'
    )
    raise CheckpointError(
        "unsupported",
        f"{folder} holds only pickled weights ({_PICKLE_NAME}), which can run code when they are loaded",
        f"if you trust them, convert them once: {convert}",
        file=pickle,
        expected=WEIGHTS_NAME,
        found=_PICKLE_NAME,
    )


def _no_module_matches(config: LoraConfig, modules: Mapping[str, TrainedModule]) -> CheckpointError:
    kinds = sorted(
        {name.rpartition(".")[2] for name, module in modules.items() if module.is_linear or module.is_embedding}
    )
    wanted = config.target_modules if isinstance(config.target_modules, str) else ", ".join(config.target_modules)
    return CheckpointError(
        "invalid",
        f"{config.file}: none of the base model's modules matches target_modules ({wanted[:200]}), so that the "
        "adapter would change nothing",
        CHECK_BASE,
        file=config.file,
        expected=", ".join(kinds),
        found=wanted,
    )


def _check_ranks(config: LoraConfig, targets: Mapping[str, Target], max_rank: int | None) -> None:
    highest = max(targets.values(), key=lambda target: target.rank)
    if max_rank is None or highest.rank <= max_rank:
        return
    raise CheckpointError(
        "unsupported",
        f"{config.file}: the rank of {highest.name} is {highest.rank}, and at most {max_rank} is allowed",
        f"allow ranks of {highest.rank}, or use an adapter of a lower one",
        file=config.file,
        tensor=highest.name,
        expected=f"at most {max_rank}",
        found=str(highest.rank),
    )


def _check_biases(config: LoraConfig, modules: Mapping[str, TrainedModule]) -> None:
    """PEFT's `bias` trains the base's own biases; where it has none it means nothing."""
    if config.has_trained_biases and any(module.has_bias for module in modules.values()):
        raise unsupported(config.file, "has bias: it replaces the base model's own biases", MERGE_WITH_PEFT, "bias")


def _check_tied(config: LoraConfig, targets: Mapping[str, Target], stored: Stored) -> None:
    """Where one weight is embedding and head, a weight that replaces one of them alone has no place."""
    both = (EMBEDDING, HEAD)
    replaced = [info.name for (name, part), info in stored.items() if name in both and part == names.WEIGHT]
    replaced += [info.name for (name, part), info in stored.items() if (name, part) == (HEAD, names.BASE_WEIGHT)]
    replaced += [entry for entry in config.modules_to_save if any(is_saved_by(entry, name) for name in both)]
    if replaced:
        what = f"replaces {replaced[0]} of a base model whose embedding is also its head"
        raise unsupported(config.file, what, MERGE_WITH_PEFT, replaced[0])
    if config.ties_weights and any(name in targets for name in both):
        what = "has ensure_weight_tying, which makes the embedding's factors the head's too"
        raise unsupported(config.file, what, MERGE_WITH_PEFT, "ensure_weight_tying")
