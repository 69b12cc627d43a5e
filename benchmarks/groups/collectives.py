"""Two tensor-parallel ranks, each a process: what decode steps put into collectives, and how long they take."""

import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from loader.checkpoint import open_checkpoint
from loader.config import ModelConfig
from loader.shares import RankPlace
from worker_service.runtime.dummy import decode_step, prefill_step
from worker_service.runtime.report import Meeting
from worker_service.runtime.step import Sampling
from worker_service.runtime.worker import WorkerRuntime
from worker_service.settings import WorkerSettings

SIZE = 2
NUM_SEQUENCES = 8
PROMPT_LEN = 16
_TIMEOUT_S = 300.0
# Of a step, what ranks may wait for each other because they do not compute equally fast.
_WAITED_PART = 0.05


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """Medians over decode steps of rank 0. `time_ratio` compares the time in collectives, waiting for the other rank
    included, with bare ones, or with a small part of the step where that is more."""

    num_calls: int
    num_bytes: int
    expected_bytes: int
    us_per_step: float
    bare_us_per_step: float
    step_us: float

    @property
    def time_ratio(self) -> float:
        """Time in the collectives of a step over that of bare ones, or over what counts of the step."""
        return self.us_per_step / max(self.bare_us_per_step, _WAITED_PART * self.step_us)


def measure_collectives(path: Path, *, num_steps: int) -> CollectiveResult:
    """Runs both ranks to the end. Raises RuntimeError when one of them fails."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(SIZE)]
    processes = [
        context.Process(target=_run_rank, args=(rank, path, num_steps, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        address = _receive(pipes[0][0])
        pipes[1][0].send(address)
        pipes[0][0].send(address)
        results = [_receive(ours) for ours, _ in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    result = results[0]
    assert isinstance(result, CollectiveResult)
    return result


def expected_bytes(config: ModelConfig, num_rows: int) -> int:
    """What a greedy decode step of `num_rows` sequences puts into collectives, in float32.

    The hidden states once for the embedding and twice a layer; of the head the likeliest token and its logit, each in
    8 bytes; and the tokens that rank 0 chose.
    """
    hidden = num_rows * config.hidden_size * 4
    return (1 + 2 * config.num_layers) * hidden + num_rows * (2 * 8) + num_rows * 8


def _receive(pipe: Connection) -> object:
    if not pipe.poll(_TIMEOUT_S):
        raise RuntimeError("a rank does not answer")
    try:
        return pipe.recv()
    except EOFError as error:
        raise RuntimeError("a rank ended; what it says is above") from error


def _run_rank(rank: int, path: Path, num_steps: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    runtime, place = WorkerRuntime(WorkerSettings(threads=1, restart_store="off")), RankPlace(rank, SIZE)
    if rank == 0:
        pipe.send(runtime.init_device(place, Meeting(1)).rendezvous)
    runtime.init_device(place, Meeting(1, pipe.recv()))
    runtime.load_model(path, "float32", lambda *_: None, lambda: False)
    runtime.initialize_cache(256, 16, 256)
    lengths = [PROMPT_LEN] * NUM_SEQUENCES
    runtime.execute(prefill_step(lengths, 16, Sampling(), num_steps + 1))
    cost, calls, sizes, times, steps = runtime.group.cost, [], [], [], []
    for number in range(num_steps):
        before, begin = (cost.num_calls, cost.num_bytes, cost.duration_ns), time.perf_counter_ns()
        runtime.execute(decode_step(lengths, number))
        steps.append(time.perf_counter_ns() - begin)
        calls.append(cost.num_calls - before[0])
        sizes.append(cost.num_bytes - before[1])
        times.append(cost.duration_ns - before[2])
    config = open_checkpoint(path).config
    bare = [_bare_ns(runtime, config) for _ in range(num_steps)]
    pipe.send(
        CollectiveResult(
            num_calls=statistics.median_high(calls),
            num_bytes=statistics.median_high(sizes),
            expected_bytes=expected_bytes(config, NUM_SEQUENCES),
            us_per_step=statistics.median(times) / 1e3,
            bare_us_per_step=statistics.median(bare) / 1e3,
            step_us=statistics.median(steps) / 1e3,
        )
    )


def _bare_ns(runtime: WorkerRuntime, config: ModelConfig) -> int:
    """A step's collectives with nothing between them."""
    group, hidden = runtime.group, torch.zeros(NUM_SEQUENCES, config.hidden_size)
    pair, tokens = torch.zeros(NUM_SEQUENCES, 2, dtype=torch.float64), torch.zeros(NUM_SEQUENCES, dtype=torch.int64)
    begin = time.perf_counter_ns()
    for _ in range(1 + 2 * config.num_layers):
        group.all_reduce(hidden)
    group.all_gather(pair)
    group.agree(tokens.numpy())
    return time.perf_counter_ns() - begin
