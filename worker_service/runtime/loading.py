"""How weights come into an engine: from the restart store, or from the checkpoint; timed phase by phase."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loader.checkpoint import Checkpoint
from loader.errors import LoadCancelled
from loader.integrity import bytes_to_verify, verify_once
from loader.layout import weight_slices
from loader.quantised.load import load_rank
from loader.quantised.roundings import Rounding
from loader.shares import RankPlace
from loader.store.key import EntryKey, content_of
from loader.weights import bytes_to_read
from worker_service.runtime.engine import Engine, TorchEngine
from worker_service.runtime.report import LoadPhase
from worker_service.runtime.restart_store import RestartStore, Tensors, entry_key


class LoadPhases:
    """The phases of a load, one after the other: when one begins, the one before ends, so none of the time is lost.

    Every step of a phase is told to `progress(phase, done_bytes, total_bytes)`, and asks `cancelled`. A phase can come
    twice.
    """

    def __init__(self, progress: Callable[[str, int, int], None], cancelled: Callable[[], bool]) -> None:
        self.is_cancelled = cancelled
        self._progress = progress
        self._ended: list[LoadPhase] = []
        self._name, self._done_bytes, self._total_bytes = "inspect", 0, 0
        self.begin_unix_ns = time.time_ns()
        self._begin_ns = time.perf_counter_ns()
        self._progress(self._name, 0, 0)

    def enter(self, name: str, total_bytes: int = 0) -> None:
        """Begins a phase that is to deal with so many bytes; 0 where that is not known. Raises LoadCancelled."""
        self._end()
        self._name, self._done_bytes, self._total_bytes = name, 0, total_bytes
        self.advance(0)

    def advance(self, done_bytes: int) -> None:
        """The phase has dealt with so many bytes so far. Raises LoadCancelled."""
        self._done_bytes = done_bytes
        self._progress(self._name, done_bytes, max(done_bytes, self._total_bytes))
        if self.is_cancelled():
            raise LoadCancelled

    def finish(self) -> tuple[LoadPhase, ...]:
        """Ends the last phase; answers all, in their order."""
        self._end()
        return tuple(self._ended)

    def _end(self) -> None:
        now = time.perf_counter_ns()
        self._ended.append(LoadPhase(self._name, now - self._begin_ns, self._done_bytes))
        self._begin_ns = now


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Whose weights are to be loaded, in which type and where, and what those that are not quantised are rounded to,
    and keys and values to `stored`."""

    checkpoint: Checkpoint
    place: RankPlace
    dtype: torch.dtype
    device: torch.device
    rounding: Rounding | None = None
    stored: torch.dtype | None = None

    def makes_the_same(self, other: "LoadJob") -> bool:
        """Whether a worker that has done this one has what the other asks for; a worker's place and device stay."""
        mine, theirs = ((job.dtype, job.quantisation, job.stored) for job in (self, other))
        return self.checkpoint.fingerprint == other.checkpoint.fingerprint and mine == theirs

    @property
    def quantisation(self) -> str:
        """What is done to the weights of the checkpoint: "int8" and the like, "none", or "kept" where they are
        quantised and stay so."""
        kept = "none" if self.checkpoint.config.quantisation is None else "kept"
        return self.rounding or kept

    @property
    def is_quantised(self) -> bool:
        """Whether most of its weights are kept quantised."""
        return self.quantisation != "none"


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine holds, in bytes; `mapped_bytes` of it are shared pages of the restart store."""

    weight_bytes: int
    mapped_bytes: int


def load_into(engine: Engine, job: LoadJob, store: RestartStore | None, phases: LoadPhases) -> Held:
    """Brings the weights of `job` into an engine.

    Phases, as needed: "map", "verify", "read", "pack", "store", "map", "attach".

    With a store, weights that it has are mapped and nothing is read. Others are written to it once they are packed,
    and mapped from there on a CPU. Raises CheckpointError and LoadCancelled.
    """
    # Plain torch has oneDNN pack the tensors that are attached, which makes a copy that cannot be mapped; not those of
    # quantised weights.
    is_copied = engine.layout == TorchEngine.layout and not job.is_quantised
    if store is not None and store.suits(job.device, is_copied=is_copied) and store.is_usable():
        tensors, is_mapped = _mapped(engine, job, store, phases)
    else:
        tensors, is_mapped = _packed(engine, job, phases), False
    num_bytes = _size(tensors)
    phases.enter("attach", num_bytes)
    # Nothing else names them from here on: an engine that lays them out anew lets go of each as it does.
    on_device = {name: tensors.pop(name).to(job.device) for name in list(tensors)}
    weight_bytes = engine.attach(on_device)
    phases.advance(num_bytes)
    return Held(weight_bytes, num_bytes if is_mapped and not is_copied else 0)


def _mapped(engine: Engine, job: LoadJob, store: RestartStore, phases: LoadPhases) -> tuple[Tensors, bool]:
    """Packed weights, and whether they are pages of the store. What it has not, would not take or could not give back
    comes from the checkpoint."""
    is_on_host = job.device.type == "cpu"
    phases.enter("map")
    quantisation, layout = job.quantisation, engine.layout
    try:
        key = entry_key(
            job.checkpoint, job.place, job.device, dtype=job.dtype, quantisation=quantisation, layout=layout
        )
    except OSError:
        # A file is gone, and reading says which.
        return _packed(engine, job, phases), False
    tensors = store.look_up(key, phases.advance)
    if tensors is not None:
        return tensors, is_on_host
    packed = _packed(engine, job, phases)
    if not _is_unchanged(job.checkpoint, key):
        # Files that were changed while they were read may have given some of the old and some of the new.
        return packed, False
    count = len(packed)
    phases.enter("store", _size(packed))
    # Each tensor is let go of as it is written, so that memory holds the weights once.
    is_kept = store.keep(key, packed, str(job.checkpoint.path), phases.advance, takes=is_on_host)
    if len(packed) == count:
        return packed, False
    if is_kept:
        phases.enter("map")
        tensors = store.look_up(key, phases.advance)
        if tensors is not None:
            return tensors, True
    return _packed(engine, job, phases), False


def _is_unchanged(checkpoint: Checkpoint, key: EntryKey) -> bool:
    try:
        return content_of(checkpoint) == key.content
    except OSError:
        return False


def _packed(engine: Engine, job: LoadJob, phases: LoadPhases) -> Tensors:
    """The weights, read from the checkpoint; files whose hash is known are held against it before, once."""
    num_unverified = bytes_to_verify(job.checkpoint)
    if num_unverified:
        phases.enter("verify", num_unverified)
        verify_once(job.checkpoint, lambda done, _total: phases.advance(done), phases.is_cancelled)
    wanted = weight_slices(job.checkpoint.config, job.place)
    phases.enter("read", bytes_to_read(job.checkpoint, wanted))
    tensors = load_rank(
        job.checkpoint,
        job.place,
        dtype=job.dtype,
        rounding=job.rounding,
        progress=phases.advance,
        cancelled=phases.is_cancelled,
    )
    num_bytes = _size(tensors)
    phases.enter("pack", num_bytes)
    packed = engine.pack(tensors)
    phases.advance(num_bytes)
    return packed


def _size(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
