"""A scheduler's group of ranks that only answer, in a process of their own: what a step costs the scheduler."""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc

from scheduler_service.core.plan import StepPlan
from scheduler_service.engine.causes import EpochEnd
from scheduler_service.engine.group import WorkerGroup
from scheduler_service.engine.ports import Place, StepTimings
from scheduler_service.engine.ranks import Rank
from scheduler_service.engine.supervision import Unsupervised
from scheduler_service.rpc.worker_client import WorkerClient
from stepwire.rpc.server import create_server
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1 import worker_pb2_grpc

NUM_SEQUENCES = 64
ACKNOWLEDGE_EVERY = 8
_TIMEOUT_S = 60.0
_WARM_STEPS = 20


@dataclass(frozen=True, slots=True)
class FanoutResult:
    """Of a step sent to so many ranks: CPU time of the scheduler's process, and time until it was answered."""

    num_ranks: int
    cpu_us: float
    wall_us: float
    step_bytes: int


async def measure_fanout(num_ranks: int, *, num_steps: int) -> FanoutResult:
    """Sends steps one after the other, each of a decode of 64 sequences."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(num_ranks, theirs), daemon=True)
    process.start()
    try:
        if not await asyncio.to_thread(ours.poll, _TIMEOUT_S):
            raise RuntimeError("the simulated ranks do not start")
        return await _drive(ours.recv(), num_steps)
    finally:
        process.kill()
        process.join()


async def _drive(ports: list[int], num_steps: int) -> FanoutResult:
    clients = [WorkerClient(f"127.0.0.1:{port}", key=None, tracer=get_tracer(None)) for port in ports]
    ranks = [Rank(i, client, Place.of(i, len(ports), 1)) for i, client in enumerate(clients)]
    answered, ends = asyncio.Event(), list[EpochEnd]()
    group = WorkerGroup(
        ranks,
        1,
        step_timeout_s=_TIMEOUT_S,
        observer=_Nobody(),
        supervision=Unsupervised(),
        on_result=lambda _result: answered.set(),
        on_end=ends.append,
    )
    try:
        await group.open()
        cpu: list[float] = []
        wall: list[float] = []
        for step_id in range(1, _WARM_STEPS + num_steps + 1):
            answered.clear()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            await group.send(_plan(step_id))
            await asyncio.wait_for(answered.wait(), _TIMEOUT_S)
            if step_id > _WARM_STEPS:
                cpu.append(time.process_time() - cpu_begin)
                wall.append(time.perf_counter() - begin)
        if ends:
            raise RuntimeError(str(ends[0].error))
        # The mean: acknowledgements and heartbeats come with some steps only.
        size = len(clients[0].encode_step(_plan(1), 1))
        return FanoutResult(len(ports), statistics.mean(cpu) * 1e6, statistics.median(wall) * 1e6, size)
    finally:
        await group.close()
        for client in clients:
            await client.close()


def _plan(step_id: int) -> StepPlan:
    ids, zeros = list(range(1, NUM_SEQUENCES + 1)), [0] * NUM_SEQUENCES
    plan = StepPlan(step_id)
    plan.sequence_ids += ids
    plan.scheduled_token_counts += [1] * NUM_SEQUENCES
    plan.computed_token_counts += [100 + step_id] * NUM_SEQUENCES
    plan.new_block_counts += zeros
    return plan


class _Nobody:
    """Measures no steps."""

    def step_sent(self, plan: StepPlan) -> None: ...
    def step_written(self) -> None: ...
    def step_answered(self, rank: int, timings: StepTimings, seconds: float) -> None: ...


class _Answering(worker_pb2_grpc.WorkerServiceServicer):
    """A rank that answers steps and does nothing else."""

    def __init__(self, *, is_output: bool) -> None:
        self._is_output = is_output

    async def GetStatus(self, _request: pb.GetStatusRequest, _context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(phase=pb.PHASE_READY, epoch=1)

    async def ExecuteModel(
        self, request_iterator: AsyncIterator[pb.ExecuteModelRequest], _context: Any
    ) -> AsyncIterator[pb.ExecuteModelResponse]:
        async for request in request_iterator:
            step = request.step
            if request.WhichOneof("message") == "open":
                yield pb.ExecuteModelResponse(open=pb.OpenStream(epoch=1))
            elif self._is_output:
                tokens = [7] * len(step.sequence_ids)
                result = pb.StepResult(epoch=1, step_id=step.step_id, sequence_ids=step.sequence_ids, token_ids=tokens)
                yield pb.ExecuteModelResponse(result=result)
            elif step.step_id % ACKNOWLEDGE_EVERY == 0:
                yield pb.ExecuteModelResponse(result=pb.StepResult(epoch=1, step_id=step.step_id))


def _serve(num_ranks: int, pipe: Connection) -> None:
    asyncio.run(_serve_ranks(num_ranks, pipe))


async def _serve_ranks(num_ranks: int, pipe: Connection) -> None:
    servers: list[grpc.aio.Server] = []
    ports = []
    for rank in range(num_ranks):
        server = create_server(tracer_provider=None, max_message_bytes=1 << 24)
        servicer = _Answering(is_output=rank == 0)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    pipe.send(ports)
    await asyncio.Event().wait()
