"""What can be set on a worker service."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stepwire.rpc.exposure import is_loopback


class WorkerSettings(BaseModel):
    """Settings of one worker process.

    A worker that listens beyond loopback is reachable by strangers, so it must have a cluster key
    and may load only below its model roots; settings without them are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, max_length=253, description="Address to listen on.")
    port: int = Field(50061, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d{1,3})?|sim)$",
        description='Device to run on: "cpu", "cuda" or "cuda:N"; "sim" only simulates one, and answers nonsense.',
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of the model; by default the cores that this process may use, divided by local_ranks.",
    )
    native_kernels: bool = Field(
        True,
        description="On a CPU, compute with kernels compiled for it, and not plain torch, where they know the model.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On CUDA, record steps of one token a sequence at the warm-up, and replay them.",
    )
    memory_fraction: float = Field(
        0.9, gt=0.0, le=1.0, description="Part of the device's memory that this process may use."
    )
    memory_limit_bytes: int | None = Field(
        None,
        ge=1,
        le=2**50,
        description="Most bytes of the device's memory that this process may use, whatever it has.",
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        le=2**50,
        description="Bytes for the KV cache; by default what the limits leave, on a CPU no more than a quarter of the "
        "memory and 4 GiB.",
    )
    local_ranks: int = Field(
        1,
        ge=1,
        le=1024,
        description="Workers on this machine that share its memory and cores; a CPU's are divided among them.",
    )
    rendezvous: Literal["auto", "env://"] = Field(
        "auto",
        description="Where rank 0 lets the ranks of a group meet: on a free port of collective_interface, or at "
        "the MASTER_ADDR and MASTER_PORT that a launcher sets.",
    )
    collective_interface: str = Field(
        "lo",
        min_length=1,
        max_length=64,
        description="Network interface, or an address of this machine, that collectives between ranks bind.",
    )
    collective_timeout: float = Field(
        60.0,
        gt=0.0,
        le=86_400.0,
        description="Seconds after which a collective, or the forming of the group, counts as failed.",
    )
    restart_store: str = Field(
        "auto",
        min_length=1,
        max_length=4096,
        description='Folder on a tmpfs, of mode 0700, that keeps packed weights for a restart; "auto" keeps them in '
        '/dev/shm/stepwire-UID while the service lives, where that costs no memory; "off" keeps none.',
    )
    restart_store_bytes: int | None = Field(
        None, ge=1, le=2**50, description="Most bytes that restart_store may hold; by default what its tmpfs has."
    )
    adapter_slots: int = Field(
        0, ge=0, le=256, description="Most adapters in use at once; 0 takes none. Each has its place on the device."
    )
    max_adapter_rank: int = Field(64, ge=1, le=512, description="Highest rank of an adapter.")
    adapter_host_bytes: int = Field(
        2 * 2**30, ge=1, le=2**50, description="Most bytes of host memory for all adapters together."
    )
    sim_compute_flops: float = Field(
        0.0, ge=0.0, le=1e24, description="Arithmetic of a simulated device, in FLOP/s; 0 is without limit."
    )
    sim_bandwidth_bytes: float = Field(
        0.0, ge=0.0, le=1e24, description="Memory bandwidth of a simulated device, in bytes/s; 0 is without limit."
    )
    sim_latency_s: float = Field(
        0.0, ge=0.0, le=3600.0, description="Seconds that each step of a simulated device takes on top."
    )
    sim_memory_bytes: int = Field(16 * 2**30, ge=1, le=2**50, description="Memory of a simulated device, in bytes.")
    sim_fatal_token: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Token id that crashes the process of a simulated device whenever a sequence comes that holds it, "
        "to try recovery out.",
    )
    model_roots: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="Folders that models may be loaded from; empty allows any path, on loopback only.",
    )
    cluster_key: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        pattern=r"^[\x21-\x7e]+$",
        repr=False,
        description="Key that a scheduler must present; required off loopback.",
    )
    scheduler_timeout: float | None = Field(
        None,
        gt=0.0,
        le=31_536_000.0,
        description="Seconds without a scheduler after which the worker exits; by default it waits for ever.",
    )
    otlp_endpoint: str | None = Field(
        None, max_length=2048, description="OTLP/gRPC collector that spans go to; none by default."
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0.0, le=1.0, description="Part of the traces begun here that is sampled; callers decide for their own."
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port that answers Prometheus at /metrics, on the same host; 0 takes any free one.",
    )
    log_format: Literal["auto", "json", "pretty"] = Field(
        "auto", description='Form of log lines: "json", "pretty", or "auto" for pretty on a terminal.'
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")

    @model_validator(mode="after")
    def _guard_exposure(self) -> "WorkerSettings":
        if is_loopback(self.host):
            return self
        if self.cluster_key is None:
            raise ValueError(
                f"host {self.host} is reachable from other machines: set cluster_key, or listen on 127.0.0.1"
            )
        if not self.model_roots:
            raise ValueError(
                f"host {self.host} is reachable from other machines: set model_roots, or listen on 127.0.0.1"
            )
        return self
