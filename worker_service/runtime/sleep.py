"""What a runtime remembers while it sleeps, and how it gives memory back."""

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_service.runtime.errors import RuntimeFailure
from worker_service.runtime.grammars import GrammarStore


@dataclass(frozen=True, slots=True)
class LoadSource:
    """The call that loaded a model, and what it found."""

    path: Path
    dtype: str
    quantize: str
    kv_cache_dtype: str
    fingerprint: str

    def check(self, fingerprint: str) -> None:
        """Raises RuntimeFailure "invalid" for another content: what was promised to clients would change."""
        if fingerprint != self.fingerprint:
            raise RuntimeFailure(
                "invalid",
                f"{self.path} holds another checkpoint than before the sleep (fingerprint {fingerprint[:16]}, not "
                f"{self.fingerprint[:16]}); put the files back, or restart the server to serve the new ones",
                {"path": str(self.path), "found": fingerprint, "expected": self.fingerprint},
            )


@dataclass(frozen=True, slots=True)
class Asleep:
    """What to wake up to: number of blocks, block size and longest context of the cache; where the weights are from;
    and the compiled grammars, which take no memory of the device."""

    sizes: tuple[int, int, int]
    source: LoadSource
    grammars: GrammarStore


def give_back(device: torch.device) -> None:
    """Returns memory that nothing holds any more from this process's allocators to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    # glibc alone keeps freed memory and has this function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
