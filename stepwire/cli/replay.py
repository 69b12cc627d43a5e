"""`stepwire replay`."""

import asyncio
import dataclasses
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepwire.cli.errors import EXIT_FAILURE
from stepwire.cli.tables import print_table

if TYPE_CHECKING:
    from scheduler_service.rpc.replay import ReplayPlan, ReplayReport
    from stepwire.v1 import flight_pb2

_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 60.0
_NUM_SHOWN = 10
# What a worker takes by default, and more where the recording needs it.
_ADAPTER_RANK = 64


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be replayed: on which checkpoint, with adapters from where."""

    header: "flight_pb2.FlightHeader"
    plan: "ReplayPlan"
    model: str
    adapters: Sequence[str]


@click.command(name="replay")
@click.argument("recording", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", help="Checkpoint to run; by default the one that the recording names.")
@click.option("--device", default="cpu", show_default=True, help="Device of the worker that is started for it.")
@click.option("--worker", "address", metavar="HOST:PORT", help="A worker that runs and serves nobody, instead.")
@click.option("--cluster-key", envvar="STEPWIRE_CLUSTER_KEY", help="That worker's key. [STEPWIRE_CLUSTER_KEY]")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="PATH",
    help="Folder of an adapter that the recording needs; may be repeated. By default where it was recorded.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def replay(
    recording: Path,
    model: str | None,
    device: str,
    address: str | None,
    cluster_key: str | None,
    adapters: tuple[str, ...],
    *,
    as_json: bool,
) -> int:
    """Run the steps of a flight recording again, and compare.

    A scheduler writes a recording when its workers fail, and when it is asked to (`stepwire admin flight`). Exits
    with 0 when every token came out as it was recorded.
    """
    from scheduler_service.rpc.flight_file import read
    from scheduler_service.rpc.replay import ReplayPlan
    from stepwire.telemetry.logs import configure_logging

    configure_logging(format="auto", level="warning", service="stepwire-replay")
    message = read(recording)
    plan = ReplayPlan(message)
    if not as_json:
        click.echo(
            f"{len(message.steps)} steps of epoch {message.header.epoch}, written because: {message.header.reason}"
        )
    path = os.path.abspath(model or message.header.model_path)
    job = _Job(message.header, plan, path, [os.path.abspath(adapter) for adapter in adapters])
    report = asyncio.run(_run(job, device, address, cluster_key))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print(report)
    return EXIT_FAILURE if report.differences else 0


async def _run(job: _Job, device: str, address: str | None, key: str | None) -> "ReplayReport":
    if address is not None:
        return await _replay(job, address, key)
    async with _own_worker(device, job.plan) as (own_address, own_key):
        return await _replay(job, own_address, own_key)


@asynccontextmanager
async def _own_worker(device: str, plan: "ReplayPlan") -> AsyncIterator[tuple[str, str]]:
    """A worker of this machine that ends with the block; its address and key."""
    from stepwire.cli.serve_plan import child_spec
    from stepwire.supervisor.child import Child
    from stepwire.supervisor.ports import free_port
    from worker_service.settings import WorkerSettings

    port, key = free_port(), secrets.token_urlsafe(32)
    values = {
        **{"port": port, "device": device, "cluster_key": key, "log_level": "warning"},
        "adapter_slots": len(plan.adapters),
        "max_adapter_rank": max((_ADAPTER_RANK, *(adapter.rank for adapter in plan.adapters))),
    }
    child = await Child.start(child_spec("worker", "worker", WorkerSettings.model_validate(values)))
    try:
        yield f"{_LOOPBACK}:{port}", key
    finally:
        child.send(signal.SIGTERM)
        await child.wait()


async def _replay(job: _Job, address: str, key: str | None) -> "ReplayReport":
    from loader.checkpoint import open_checkpoint
    from scheduler_service.engine.start import GroupStarter, StartPlan
    from scheduler_service.rpc.replay import prepare
    from scheduler_service.rpc.replay import replay as run_steps
    from scheduler_service.rpc.worker_client import WorkerClient
    from stepwire.telemetry.trace import get_tracer

    header, model, plan = job.header, job.model, job.plan
    checkpoint = await asyncio.to_thread(open_checkpoint, Path(model))
    if header.fingerprint != checkpoint.fingerprint:
        click.echo(f"stepwire replay: {model} is not the checkpoint that was recorded, or a copy of it", err=True)
    start = StartPlan(
        model_path=model,
        dtype=header.dtype,
        quantize=header.quantize,
        # Recordings of older versions name none.
        kv_cache_dtype=header.kv_cache_dtype or "auto",
        fingerprint=checkpoint.fingerprint,
        architecture=checkpoint.config.architecture,
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=header.max_model_len,
        max_sequences=header.max_sequence_count,
        max_step_tokens=header.max_step_token_count,
        block_size=header.block_size,
        # One sequence of the longest context must fit, by the rule of every start.
        num_blocks=max(plan.num_blocks, -(-header.max_model_len // header.block_size)),
        worker_timeout_s=_TIMEOUT_S,
    )
    tracer = get_tracer(None)
    client = WorkerClient(address, key=key, tracer=tracer)
    try:
        started = await GroupStarter([client], start, tracer).start()
        await prepare(client, started.epoch, plan, job.adapters)
        return await run_steps(client, started.epoch, plan)
    finally:
        await client.close()


def _print(report: "ReplayReport") -> None:
    click.echo(
        f"{report.num_steps} steps and {report.num_tokens} tokens again, after {report.num_restoring_steps} steps that "
        f"computed what the worker knew before; {report.num_left_out} sequences left out"
    )
    click.echo(
        f"model: {report.recorded_forward_s * 1e3:.1f} ms recorded, {report.replayed_forward_s * 1e3:.1f} ms now; "
        f"whole steps: {report.replayed_total_s * 1e3:.1f} ms now"
    )
    if not report.differences:
        click.echo("every token as recorded")
        return
    rows = [
        (str(found.step_id), str(found.sequence_id), _tokens(found.recorded), _tokens(found.replayed))
        for found in report.differences[:_NUM_SHOWN]
    ]
    click.echo(f"{len(report.differences)} results came out otherwise; the first:")
    print_table([("STEP", "SEQUENCE", "RECORDED", "NOW"), *rows])


def _tokens(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids)) or "none"
