"""Python, packages and generated code."""

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from stepwire.cli.checks.finding import Finding

_PACKAGES = ("stepwire", "grpcio", "protobuf", "pydantic", "tokenizers", "opentelemetry-api")
_PROBE_TIMEOUT_S = 120
_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
nccl = cuda and torch.distributed.is_nccl_available()
def device(index):
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "total_bytes": total, "free_bytes": free,
            "capability": f"{properties.major}.{properties.minor}"}
print(json.dumps({
    "version": torch.__version__,
    "cuda_version": torch.version.cuda,
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    "num_threads": torch.get_num_threads(),
    "devices": [device(index) for index in range(torch.cuda.device_count())] if cuda else [],
}))
"""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device as torch sees it."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str


@dataclass(frozen=True, slots=True)
class TorchReport:
    """What torch says of itself; `error` is set, and all else empty, when it cannot be imported."""

    error: str | None = None
    version: str = ""
    cuda_version: str | None = None
    nccl_version: str | None = None
    num_threads: int = 0
    devices: tuple[CudaDevice, ...] = ()


def probe_torch() -> TorchReport:
    """Asks torch in a process of its own: a broken installation may crash the one that imports it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return TorchReport(error=f"did not answer within {_PROBE_TIMEOUT_S} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return TorchReport(error=lines[-1] if lines else f"ended with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    return TorchReport(**{**found, "devices": tuple(CudaDevice(**device) for device in found["devices"])})


def check_software(torch: TorchReport) -> Iterator[Finding]:
    """Python, the packages that matter, torch, and whether the generated code loads."""
    text = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    yield Finding("ok", "python", text)
    yield Finding("ok", "packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    yield _generated_code()
    if torch.error:
        remedy = "needed by workers: run `make setup`, or pip install 'stepwire[worker]'; a scheduler does without"
        yield Finding("warn", "torch", torch.error, remedy)
    else:
        built = f"CUDA {torch.cuda_version}" if torch.cuda_version else "CPU only"
        nccl = f", NCCL {torch.nccl_version}" if torch.nccl_version else ""
        yield Finding("ok", "torch", f"{torch.version} ({built}{nccl})")
    if os.environ.get("PYTHONPATH"):
        text = f"PYTHONPATH is set: {os.environ['PYTHONPATH']}"
        yield Finding("warn", "environment", text, "unset it unless you mean it; it may hide installed packages")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _generated_code() -> Finding:
    try:
        importlib.import_module("stepwire.v1.worker_pb2_grpc")
        importlib.import_module("stepwire.v1.inference_pb2_grpc")
    # Both runtimes refuse code that is too new for them, each with a type of its own.
    except Exception as error:
        return Finding("fail", "protocol", str(error), "install the versions of grpcio and protobuf in requirements/")
    return Finding("ok", "protocol", "the generated code fits the installed grpcio and protobuf")
