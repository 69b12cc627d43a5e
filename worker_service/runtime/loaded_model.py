"""A model that a worker has loaded: its engine with the weights, its adapters and its grammars."""

from dataclasses import dataclass
from typing import Protocol

from worker_service.kernels.native import Pool
from worker_service.models.native import computes
from worker_service.runtime.device import usable_cores
from worker_service.runtime.engine import Engine, TorchEngine
from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.grammars import GrammarStore
from worker_service.runtime.group import RankGroup
from worker_service.runtime.loading import LoadJob, LoadPhases, load_into
from worker_service.runtime.memory import explains_out_of_memory
from worker_service.runtime.model_adapters import AdapterSettings, ModelAdapters
from worker_service.runtime.native import NativeEngine
from worker_service.runtime.report import LoadSummary
from worker_service.runtime.restart_store import RestartStore
from worker_service.runtime.sleep import LoadSource


class ModelSettings(AdapterSettings, Protocol):
    """What loading a model needs of the worker's settings."""

    @property
    def cuda_graphs(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights."""

    job: LoadJob
    engine: Engine
    weight_bytes: int
    mapped_bytes: int
    adapters: ModelAdapters
    grammars: GrammarStore
    source: LoadSource

    def summary(self, *, already_loaded: bool, phases: LoadPhases) -> LoadSummary:
        """What there is to tell of the load, whose phases it ends."""
        config, ended = self.job.checkpoint.config, phases.finish()
        return LoadSummary(
            fingerprint=self.job.checkpoint.fingerprint,
            architecture=config.architecture,
            weight_bytes=self.weight_bytes,
            dtype=str(self.job.dtype).removeprefix("torch."),
            kv_bytes_per_token=self.engine.kv_bytes_per_token,
            vocab_size=config.vocab_size,
            max_position_count=config.max_position_count,
            already_loaded=already_loaded,
            duration_ns=sum(phase.duration_ns for phase in ended),
            phases=ended,
            mapped_bytes=self.mapped_bytes,
            num_adapter_slots=self.adapters.num_slots,
            begin_unix_ns=phases.begin_unix_ns,
        )


def load_model(
    job: LoadJob,
    phases: LoadPhases,
    source: LoadSource,
    *,
    settings: ModelSettings,
    group: RankGroup,
    store: RestartStore | None,
    pool: Pool | None,
) -> LoadedModel:
    """Reads the weights of a job, or maps them from the store; `pool` runs the compiled kernels, where there are any.

    Raises RuntimeFailure, LoadCancelled.
    """
    try:
        engine = _make_engine(job, settings, group, pool)
    except ValueError as error:
        raise RuntimeFailure("unsupported", f"the model cannot be split over these ranks: {error}") from error
    with explains_out_of_memory(job.device, f"the weights of {job.checkpoint.path}", "use a smaller model"):
        held = load_into(engine, job, store, phases)
    adapters = ModelAdapters(settings, job, engine)
    grammars = GrammarStore.of_checkpoint(job.checkpoint, num_threads=_num_mask_threads())
    return LoadedModel(job, engine, held.weight_bytes, held.mapped_bytes, adapters, grammars, source)


def _make_engine(job: LoadJob, settings: ModelSettings, group: RankGroup, pool: Pool | None) -> Engine:
    """The compiled kernels where they compute the model, else plain torch. Raises as TorchEngine does."""
    config = job.checkpoint.config
    if pool is not None and computes(config, job.place, job.dtype, job.rounding, job.stored):
        return NativeEngine(config, job.dtype, pool, job.place, group, stored=job.stored)
    records = settings.cuda_graphs
    return TorchEngine(config, job.place, job.dtype, job.device, group, stored=job.stored, records=records)


def _num_mask_threads() -> int:
    # Beside a forward pass on these cores, or on another device while these idle.
    return max(1, min(4, usable_cores() // 2))
