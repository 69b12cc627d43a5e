"""Where a worker stands: phase, epoch, and what it was asked to get there. Pure; changed by the servicer alone."""

from dataclasses import dataclass

from stepwire.rpc.errors import StepwireError
from worker_service.rpc.guard import stale_epoch
from worker_service.runtime.report import DeviceInfo, LoadSummary, MemoryReport, Phase, SleepLevel

MAX_SCHEDULER_ID_LEN = 256


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place in its group."""

    tensor_rank: int
    tensor_parallel_size: int
    pipeline_rank: int
    pipeline_parallel_size: int

    @property
    def rank(self) -> int:
        """The rank among all of the group."""
        return self.pipeline_rank * self.tensor_parallel_size + self.tensor_rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_output(self) -> bool:
        """Whether this rank answers with tokens."""
        return self.pipeline_rank == self.pipeline_parallel_size - 1 and self.tensor_rank == 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model held, and the call that asked for it."""

    dtype: str
    quantize: str
    kv_cache_dtype: str
    summary: LoadSummary


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, for which largest step."""

    max_step_tokens: int
    max_sequences: int
    report: MemoryReport


@dataclass(frozen=True, slots=True)
class Cached:
    """The KV tensors held, and the call that asked for them."""

    num_blocks: int
    block_size: int
    max_model_len: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Warm:
    """The largest step that the worker is ready for."""

    max_step_tokens: int
    max_sequences: int


@dataclass(slots=True)
class WorkerState:
    """One worker's phase and epoch, with what each phase has brought.

    What a phase brought is kept as long as it is true: `warm` outlives a reset to CACHED, so that a
    scheduler that adopts this worker need not warm it up again.
    """

    phase: Phase = Phase.STARTING
    epoch: int = 0
    scheduler_id: str = ""
    place: Place | None = None
    rendezvous: str | None = None
    """Where the ranks of the group have met in this epoch, "" for nowhere; None before InitDevice."""
    device: DeviceInfo | None = None
    loaded: Loaded | None = None
    measured: Measured | None = None
    cached: Cached | None = None
    warm: Warm | None = None
    sleep_level: SleepLevel = SleepLevel.AWAKE

    def is_new_epoch(self, epoch: int, scheduler_id: str) -> bool:
        """Whether a call that carries this epoch begins it, rather than repeats the call that did. Changes nothing.

        Raises StepwireError STALE_EPOCH for an epoch below the worker's, or equal to it and owned by
        another scheduler; FIELD_OUT_OF_RANGE or FIELD_INVALID for one that cannot be.
        """
        if epoch < 1:
            metadata = {"field": "epoch", "found": str(epoch), "expected": "at least 1"}
            raise StepwireError("FIELD_OUT_OF_RANGE", f"epoch is {epoch}; epochs count from 1", metadata)
        if not 1 <= len(scheduler_id) <= MAX_SCHEDULER_ID_LEN:
            message = f"scheduler_id must have 1..{MAX_SCHEDULER_ID_LEN} characters"
            raise StepwireError("FIELD_INVALID", message, {"field": "scheduler_id"})
        if epoch < self.epoch or (epoch == self.epoch and scheduler_id != self.scheduler_id):
            raise stale_epoch(held=self.epoch, got=epoch, scheduler_id=self.scheduler_id)
        return epoch > self.epoch

    def take_epoch(self, epoch: int, scheduler_id: str) -> None:
        """Enters an epoch."""
        self.epoch, self.scheduler_id, self.rendezvous = epoch, scheduler_id, None

    def require_epoch(self, epoch: int) -> None:
        """Raises StepwireError STALE_EPOCH unless `epoch` is the worker's."""
        if epoch != self.epoch:
            raise stale_epoch(held=self.epoch, got=epoch)

    def require_phase(self, call: str, needed: Phase, *, remedy: str = "") -> None:
        """Raises StepwireError WRONG_PHASE unless the worker is in phase `needed`."""
        if self.phase is not needed:
            raise self.wrong_phase(call, needed, remedy=remedy)

    def require_group(self, call: str) -> None:
        """Raises StepwireError WRONG_PHASE where the ranks of the group have not met in this epoch."""
        if self.place is not None and self.place.num_ranks > 1 and not self.rendezvous:
            remedy = "call InitDevice on all ranks, with the rendezvous that rank 0 answers"
            raise StepwireError(
                "WRONG_PHASE",
                f"{call} needs the ranks of the group, which have not met in epoch {self.epoch}; {remedy}",
                {"call": call, "held": self.phase.name, "needed": "rendezvous", "remedy": remedy},
            )

    def wrong_phase(self, call: str, needed: Phase, *, remedy: str = "") -> StepwireError:
        """The error of a call out of its phase."""
        if not remedy:
            remedy = (
                f"take the worker there with Reset to PHASE_{needed.name}"
                if self.phase > needed
                else f"call {_CALL_AFTER[self.phase]} first"
            )
        return StepwireError(
            "WRONG_PHASE",
            f"{call} needs phase {needed.name} and the worker is in {self.phase.name}; {remedy}",
            {"call": call, "held": self.phase.name, "needed": needed.name, "remedy": remedy},
        )

    @property
    def kept_phase(self) -> Phase:
        """The latest phase that what it holds now is good for."""
        if self.sleep_level is SleepLevel.AWAKE:
            return self.phase
        return Phase.LOADED if self.sleep_level is SleepLevel.KEEP_WEIGHTS else Phase.INITIALISED

    def drop_to(self, phase: Phase) -> None:
        """Goes back to `phase`, forgetting what later phases brought; a phase not yet passed changes nothing."""
        self.phase = min(self.phase, phase)
        self.sleep_level = SleepLevel.AWAKE
        if phase < Phase.CACHED:
            self.cached = self.warm = None
        if phase < Phase.LOADED:
            self.loaded = self.measured = None


_CALL_AFTER = {
    Phase.STARTING: "InitDevice",
    Phase.INITIALISED: "LoadModel",
    Phase.LOADED: "InitializeCache",
    Phase.CACHED: "WarmUp",
    Phase.READY: "Reset",
}
