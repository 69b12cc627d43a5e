"""Which sequences a step may name when pipeline stages compute several steps at once.

Then a sequence has at most one step in flight, and the running ones are spread over the steps: each takes an even
part of them, a cohort. Cohorts are not kept: who is in no step in flight may come into the next, and those that have
waited longest do, so that the parts stay even while sequences come and go.
"""

from collections.abc import Sequence as Seq

from scheduler_service.core.request import Sequence


def cohort_size(num_sequences: int, num_stages: int) -> int:
    """Most sequences of one step, when so many run or could."""
    return max(1, -(-num_sequences // num_stages))


def ready_sequences(running: Seq[Sequence], oldest_step_id: int, size: int) -> list[Sequence]:
    """Of the running sequences, in their order, at most `size` that are in no step from `oldest_step_id` on."""
    ready = [sequence for sequence in running if sequence.last_step < oldest_step_id]
    if len(ready) <= size:
        return ready
    chosen = {sequence.sequence_id for sequence in sorted(ready, key=lambda sequence: sequence.last_step)[:size]}
    return [sequence for sequence in ready if sequence.sequence_id in chosen]
