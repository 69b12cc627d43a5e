"""The scheduler's core and the worker's runtime in one process, with nothing between them; see peer_loop.py.

A step is planned, executed and applied, and then the next one is planned.
"""

import time
from pathlib import Path
from typing import Any

from benchmarks.peers.drain import Sizes, request
from benchmarks.peers.peer_loop import Answer, Generate, run
from loader.shares import RankPlace
from scheduler_service.core.plan import StepPlan, StepResult, TokenEvent
from scheduler_service.core.scheduler import Scheduler
from worker_service.runtime.step import NewSequence, Sampling, StepInput, StepOutput
from worker_service.runtime.worker import WorkerRuntime
from worker_service.settings import WorkerSettings


def make(options: dict[str, Any]) -> Generate:
    """The runtime, walked through the phases that a scheduler walks a worker through."""
    sizes = Sizes(**options["sizes"])
    runtime = WorkerRuntime(WorkerSettings(threads=options["threads"]))
    runtime.init_device(RankPlace())
    runtime.load_model(Path(options["model"]), sizes.dtype, lambda *_: None, lambda: False)
    runtime.determine_available_memory(sizes.max_step_tokens, sizes.max_sequences)
    runtime.initialize_cache(sizes.num_blocks, sizes.block_size, sizes.max_model_len)
    runtime.warm_up(sizes.max_step_tokens, sizes.max_sequences, lambda *_: None)
    scheduler = Scheduler(sizes.scheduler_config, time.monotonic)

    def generate(prompts: list[list[int]], max_tokens: int, _stream: bool) -> Answer:
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        times: dict[str, list[float]] = {name: [] for name in tokens}
        begin = time.perf_counter()
        for name, prompt in zip(tokens, prompts, strict=True):
            scheduler.add_request(request(name, prompt, max_tokens, Sampling()))
        while (plan := scheduler.schedule()) is not None:
            output = runtime.execute(step_input(plan))
            for event in scheduler.apply(step_result(output)):
                if not isinstance(event, TokenEvent):
                    raise SystemExit(f"a sequence failed: {event.message}")
                name = event.sequence.request.request_id
                tokens[name].append(event.token_id)
                times[name].append(time.perf_counter() - begin)
        return list(tokens.values()), list(times.values())

    return generate


def step_input(plan: StepPlan) -> StepInput:
    """A plan as the runtime takes it; its columns are handed over as they are."""
    new = [
        NewSequence(
            item.sequence_id,
            item.sequence.request.request_id,
            item.token_ids,
            item.sequence.prompt_token_count,
            item.sequence.request.sampling,  # type: ignore[arg-type]
            item.block_ids,
        )
        for item in plan.new_sequences
    ]
    return StepInput(
        step_id=plan.step_id,
        new_sequences=new,
        sequence_ids=plan.sequence_ids,
        scheduled_token_counts=plan.scheduled_token_counts,
        computed_token_counts=plan.computed_token_counts,
        new_block_counts=plan.new_block_counts,
        new_block_ids=plan.new_block_ids,
        finished_sequence_ids=plan.finished_sequence_ids,
        preempted_sequence_ids=plan.preempted_sequence_ids,
    )


def step_result(output: StepOutput) -> StepResult:
    """What the runtime answered, as the core takes it."""
    return StepResult(
        output.step_id,
        output.sequence_ids,
        output.token_ids,
        frozenset(output.stopped_sequence_ids),
        errors=output.errors,
    )


if __name__ == "__main__":
    run(make)
