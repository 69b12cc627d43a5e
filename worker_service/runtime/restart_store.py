"""The restart store as a worker uses it: whatever is wrong with it, the weights come from the checkpoint."""

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import structlog
import torch

import loader
import worker_service.kernels
import worker_service.models
from loader.checkpoint import Checkpoint
from loader.shares import RankPlace
from loader.store.errors import EntryDamaged, EntryInUse, StoreBusy, StoreFull, StoreRefused
from loader.store.folder import Limits, StoreFolder, default_folder
from loader.store.huge import collapse_later
from loader.store.key import EntryKey, code_digest, content_of, cpu_features
from loader.store.mapping import map_entry
from loader.store.tensors import mapped_tensors, write_entry
from worker_service.runtime.device import device_name
from worker_service.runtime.memory import host_memory

# So much of the host's memory stays free for everybody when an entry is written.
_RESERVE_FRACTION = 0.05

Tensors = dict[str, torch.Tensor]

_log = structlog.stdlib.get_logger(__name__)


class RestartStore:
    """Packed weights in files that outlive the process.

    A folder that was set keeps them until they are evicted. The default folder keeps them while the service lives:
    `forget`, called when a worker is told to stop, removes what no other worker has in use; one that is killed
    leaves them for the next.
    """

    def __init__(self, path: Path, limit_bytes: int | None, *, is_set: bool) -> None:
        """`limit_bytes` is for all entries together; None for what file system and memory have."""
        self._path = path
        self._limit_bytes = limit_bytes
        self._is_set = is_set
        self._name: str | None = None

    @classmethod
    def of_settings(cls, restart_store: str, restart_store_bytes: int | None) -> "RestartStore | None":
        """The store that the settings of these names ask for; None for "off", and for "auto" where there is no
        tmpfs."""
        if restart_store == "off":
            return None
        if restart_store == "auto":
            path = default_folder()
            return cls(path, restart_store_bytes, is_set=False) if path.parent.is_dir() else None
        return cls(Path(restart_store).expanduser(), restart_store_bytes, is_set=True)

    def suits(self, device: torch.device, *, is_copied: bool) -> bool:
        """Whether weights are to be kept. By default only where the mapped pages are the weights that are computed
        with: elsewhere they would be in the host's memory besides."""
        return self._is_set or (device.type == "cpu" and not is_copied)

    def is_usable(self) -> bool:
        """Whether its folder can be used; if not, the log says why."""
        with self._warns("open"), self._folder():
            return True
        return False

    def look_up(self, key: EntryKey, progress: Callable[[int], None]) -> Tensors | None:
        """The weights of a key, mapped and verified; None when they are not there, or not sound. What `progress`
        raises ends it."""
        with self._warns("look_up"), self._folder() as folder:
            entry = map_entry(folder, key.name, num_threads=torch.get_num_threads(), progress=progress)
            if entry is not None:
                self._name = key.name
                collapse_later(entry.data)
                return mapped_tensors(entry)
        return None

    def keep(
        self, key: EntryKey, tensors: Tensors, model: str, progress: Callable[[int], None], *, takes: bool
    ) -> bool:
        """Writes weights; False when that did not work. With `takes` they are taken out of `tensors` as they are
        written, also by a write that fails later. What `progress` raises ends it."""
        with self._warns("keep"), self._folder() as folder:
            limits = Limits(self._limit_bytes, _free_memory)
            num_bytes = write_entry(folder, key, tensors, model=model, limits=limits, progress=progress, takes=takes)
            self._name = key.name
            _log.info("weights_kept", path=str(self._path), key=key.name, bytes=num_bytes, until_evicted=self._is_set)
            return True
        return False

    def forget(self) -> None:
        """Removes what the default folder keeps for this worker, unless another has it in use."""
        if self._is_set or self._name is None:
            return
        # Tensors in cycles would still have it mapped.
        gc.collect()
        with suppress(EntryInUse, FileNotFoundError), self._warns("forget"), self._folder() as folder:
            folder.evict(self._name)

    def _folder(self) -> StoreFolder:
        return StoreFolder(self._path, create=True)

    @contextmanager
    def _warns(self, what: str) -> Iterator[None]:
        """Turns what can be wrong with the store into one line of the log."""
        try:
            yield
        except StoreFull as error:
            # Nobody asked for more than what there happens to be room for, unless the folder was set.
            say = _log.warning if self._is_set else _log.info
            say("weights_not_kept", reason=str(error))
        except (StoreRefused, StoreBusy, EntryDamaged, OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = f"{self._path} is full ({error.strerror}): make room there, or set restart_store to another "
                reason += 'folder on a tmpfs, or to "off"'
            _log.warning("restart_store_unusable", during=what, reason=reason)


def entry_key(
    checkpoint: Checkpoint,
    place: RankPlace,
    device: torch.device,
    *,
    dtype: torch.dtype,
    quantisation: str,
    layout: str,
) -> EntryKey:
    """The key of the weights that a worker makes of a checkpoint. Raises OSError for a file that is gone."""
    machine = cpu_features() if device.type == "cpu" else f"{device.type}-{device_name(device)}"
    return EntryKey(
        content=content_of(checkpoint),
        place=place,
        dtype=str(dtype).removeprefix("torch."),
        # What the checkpoint itself is quantised to is part of its content; whether that is kept is not.
        quantisation=quantisation,
        layout=layout,
        code=code_version(),
        machine=machine,
    )


def code_version() -> str:
    """Names the code that reads and packs weights: versions, and a digest of its sources."""
    packages = (loader, worker_service.models, worker_service.kernels)
    folders = {package.__name__: Path(path) for package in packages for path in package.__path__}
    return code_digest(folders, f"{metadata.version('stepwire')}+torch{torch.__version__}")


def _free_memory() -> int:
    memory = host_memory()
    return memory.free_bytes - int(_RESERVE_FRACTION * memory.total_bytes)
