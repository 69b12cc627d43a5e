"""What a runtime needs of the settings, for tests that use it without a service."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """One thread, plain torch and no adapters unless said otherwise."""

    native_kernels: bool = False
    cuda_graphs: bool = True
    device: str = "cpu"
    threads: int | None = 1
    memory_fraction: float = 0.9
    memory_limit_bytes: int | None = None
    kv_cache_bytes: int | None = None
    local_ranks: int = 1
    adapter_slots: int = 0
    max_adapter_rank: int = 64
    adapter_host_bytes: int = 2**30
