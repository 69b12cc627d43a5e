"""A worker in virtual time: what a step's answer will be, and what the step costs."""

from scheduler_service.core.plan import StepPlan, StepResult
from stepwire.simulation.arrivals import Arrival
from stepwire.simulation.cost import StepLoad


class VirtualWorker:
    """Answers plans as a worker would. `Request.sampling` must be the Arrival that says how long the answer gets."""

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> tuple[StepResult, StepLoad]:
        """The answer to a plan, and its load without the sequences that stopped before it. Plans come in order."""
        num_tokens, last = self._num_tokens, self._last
        for ended in (plan.finished_sequence_ids, plan.preempted_sequence_ids):
            for sequence_id in ended:
                num_tokens.pop(sequence_id, None)
                last.pop(sequence_id, None)
        for new in plan.new_sequences:
            arrival, request = new.sequence.request.sampling, new.sequence.request
            if not isinstance(arrival, Arrival):
                raise TypeError(f"request {request.request_id} does not say how long its answer gets")
            num_tokens[new.sequence_id] = len(new.token_ids)
            last[new.sequence_id] = len(request.prompt_token_ids) + arrival.num_output_tokens
        ids: list[int] = []
        tokens: list[int] = []
        stopped: list[int] = []
        skipped: list[int] = []
        columns = zip(plan.sequence_ids, plan.scheduled_token_counts, plan.computed_token_counts, strict=True)
        for place, (sequence_id, scheduled, computed) in enumerate(columns):
            held = num_tokens.get(sequence_id)
            if held is None:
                skipped.append(place)
            elif computed + scheduled == held:
                ids.append(sequence_id)
                tokens.append(held)
                if held + 1 == last[sequence_id]:
                    stopped.append(sequence_id)
                    del num_tokens[sequence_id]
                else:
                    num_tokens[sequence_id] = held + 1
        return StepResult(plan.step_id, ids, tokens, frozenset(stopped)), _load(plan, skipped, len(ids))


def _load(plan: StepPlan, skipped: list[int], num_sampled: int) -> StepLoad:
    scheduled, computed = plan.scheduled_token_counts, plan.computed_token_counts
    if skipped:
        left_out = set(skipped)
        kept = [place for place in range(len(scheduled)) if place not in left_out]
        scheduled, computed = [scheduled[i] for i in kept], [computed[i] for i in kept]
    return StepLoad.of(scheduled, computed, num_sampled)
