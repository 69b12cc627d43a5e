"""What adapters one loaded model takes, and how they are read for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from loader.adapters.adapter import Adapter, open_adapter
from loader.adapters.config import MERGE_WITH_PEFT
from loader.adapters.load import LoraFactors, load_adapter
from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.layout import Linear, parameters
from loader.shares import RankPlace
from worker_service.runtime.adapters import AdapterTable, HostAdapter, PackedAdapter, too_large
from worker_service.runtime.engine import Engine
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.loading import LoadJob

# Factors are packed in so many ranks.
_RANK_STEP = 16


class AdapterSettings(Protocol):
    """The settings of adapters; see WorkerSettings."""

    @property
    def adapter_slots(self) -> int: ...
    @property
    def max_adapter_rank(self) -> int: ...
    @property
    def adapter_host_bytes(self) -> int: ...


class ModelAdapters:
    """The adapters of one loaded model. Used by the device thread alone, but for what `reader` answers."""

    def __init__(self, settings: AdapterSettings, job: LoadJob, engine: Engine) -> None:
        slots, config = settings.adapter_slots, job.checkpoint.config
        self._problem = adapter_problem(config, num_slots=slots)
        self.num_slots = slots if self._problem is None else 0
        """Adapters that can be in use at once; 0 for a model that takes none."""
        rank = settings.max_adapter_rank
        self.device_bytes = self.num_slots * slot_bytes(config, job.place, job.dtype, rank) if self.num_slots else 0
        """Most bytes of the device that all slots take."""
        self.table = AdapterTable(
            engine.attach_adapter, num_slots=self.num_slots, max_bytes=settings.adapter_host_bytes
        )
        self._reader = AdapterReader(
            config, job.place, job.dtype, rank, settings.adapter_host_bytes, engine.pack_adapter
        )

    def reader(self) -> "AdapterReader":
        """What reads adapters for the model, on any thread.

        Raises RuntimeFailure "unsupported" where the model, or the settings, take none.
        """
        if self._problem is not None:
            raise RuntimeFailure("unsupported", self._problem)
        return self._reader


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one model. Holds nothing that changes: any thread may use it."""

    base: ModelConfig
    place: RankPlace
    dtype: torch.dtype
    max_rank: int
    max_bytes: int
    pack: Callable[[Mapping[str, LoraFactors]], PackedAdapter]

    def read(self, path: Path) -> HostAdapter:
        """Opens, checks, reads and packs an adapter. Blocks for as long as the storage takes.

        Raises CheckpointError for one that is broken, does not fit the model, or changes what is not computed at run
        time; RuntimeFailure "limit" for one that is larger than all adapters together may be.
        """
        adapter = open_adapter(path, self.base, max_rank=self.max_rank)
        _check_modules(adapter)
        if adapter.total_bytes > 4 * self.max_bytes:
            raise too_large(path, adapter.total_bytes, self.max_bytes)
        loaded = load_adapter(adapter, self.place)
        factors = {name: self._converted(adapter, name, each) for name, each in loaded.factors.items()}
        return HostAdapter(loaded.fingerprint, str(path), adapter.max_rank, self.pack(factors))

    def _converted(self, adapter: Adapter, name: str, factors: LoraFactors) -> LoraFactors:
        a, b = factors.a.to(self.dtype), factors.b.to(self.dtype)
        if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise CheckpointError(
                "invalid",
                f"{adapter.weights_file}: the factors of {name} hold values that are not finite in {self.dtype}",
                "train the adapter again, or load the model in a wider type",
                file=adapter.weights_file,
                tensor=name,
                expected="finite values",
                found="NaN or infinity",
            )
        return replace(factors, a=a, b=b)


def adapter_problem(config: ModelConfig, *, num_slots: int) -> str | None:
    """Why no adapter can be added to a model; None where one can."""
    if num_slots == 0:
        return "this worker takes no adapters: start it with adapter_slots, the number that can be in use at once"
    if config.other is not None:
        return (
            f"adapters of {config.architecture}, which runs by transformers' definition, are not supported; "
            f"{MERGE_WITH_PEFT}"
        )
    return None


def slot_bytes(config: ModelConfig, place: RankPlace, dtype: torch.dtype, max_rank: int) -> int:
    """Most bytes that one adapter takes on the device: factors of `max_rank` for all products of all layers."""
    rank = -(-max_rank // _RANK_STEP) * _RANK_STEP
    return sum(
        rank * (len(parameter.inputs) + len(parameter.outputs)) * dtype.itemsize
        for parameter in parameters(config, place)
        if isinstance(parameter, Linear) and parameter.name.startswith("model.layers.")
    )


def _check_modules(adapter: Adapter) -> None:
    """Raises CheckpointError for what an adapter changes beyond the products of layers."""
    others = [name for name in adapter.modules if not name.startswith("model.layers.")]
    others += list(adapter.full_weights)
    if others:
        raise CheckpointError(
            "unsupported",
            f"{adapter.path} changes {others[0]}: at run time only products of layers are changed",
            MERGE_WITH_PEFT,
            file=adapter.config.file,
            tensor=others[0],
            expected="products of layers",
            found=others[0],
        )
