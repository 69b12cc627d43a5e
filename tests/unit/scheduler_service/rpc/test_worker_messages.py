"""Plans to messages, answers to results."""

from dataclasses import replace

import pytest

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.plan import PromptLogprobs, StepResult
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine.values import Sampling
from scheduler_service.rpc.worker_messages import step_message, step_result
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import common_pb2
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1.errors_pb2 import ErrorReason

SAMPLING = Sampling(
    *(0.5, 3, 0.25, 0.125, 1.5, -1.0, 2.0, (2, 7), 4, 2**64 - 1, 0), 0.75, ((3, 1.5), (4, -2.0)), (3, 4, 5), (5,)
)


def scheduler() -> Scheduler:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_running=4, max_step_tokens=16)
    return Scheduler(config, lambda: 0.0)


def test_a_step_carries_every_column_of_its_plan() -> None:
    core = scheduler()
    core.add_request(Request("r1", [5, 6, 7, 8, 9], 10, sampling=SAMPLING, trace="00-1-2-01"))
    plan = core.schedule()
    assert plan is not None
    step = step_message(plan, 3)
    assert (step.epoch, step.step_id) == (3, 1)
    assert list(step.sequence_ids) == plan.sequence_ids
    assert list(step.scheduled_token_counts) == [5]
    assert list(step.computed_token_counts) == [0]
    assert list(step.new_block_counts) == [0]
    (new,) = step.new_sequences
    assert list(new.token_ids) == [5, 6, 7, 8, 9]
    assert list(new.block_ids) == plan.new_sequences[0].block_ids
    assert (new.request_id, new.prompt_token_count, new.traceparent) == ("r1", 5, "00-1-2-01")
    assert new.sampling == pb.SequenceSampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        stop_token_ids=[2, 7],
        min_tokens=4,
        seed=2**64 - 1,
        sequence_index=0,
        logprobs=0,
        typical_p=0.75,
        biased_token_ids=[3, 4],
        biases=[1.5, -2.0],
        allowed_token_ids=[3, 4, 5],
        banned_token_ids=[5],
    )
    assert new.sampling.HasField("logprobs")


def test_a_sampling_of_another_kind_is_a_defect() -> None:
    core = scheduler()
    core.add_request(Request("r1", [5], 10, sampling=None))
    plan = core.schedule()
    assert plan is not None
    with pytest.raises(TypeError, match="r1"):
        step_message(plan, 1)


def test_a_result_is_read_whole_and_logprobs_untouched() -> None:
    logprobs = common_pb2.PositionLogprobs(sampled=common_pb2.TokenLogprob(token_id=9, logprob=-1.0))
    part = common_pb2.PromptLogprobs(position=2, token_ids=[4, 5, 6], logprobs=[-1.0, -2.0, -3.0])
    result = step_result(
        pb.StepResult(
            epoch=1,
            step_id=4,
            sequence_ids=[1, 2],
            token_ids=[9, 8],
            stopped_sequence_ids=[2],
            logprobs=[pb.SequenceLogprobs(sequence_id=1, logprobs=logprobs)],
            errors=[
                pb.SequenceError(sequence_id=3, message="bad"),
                pb.SequenceError(sequence_id=4, message="asked", reason=ErrorReason.ERROR_REASON_GRAMMAR_INVALID),
                pb.SequenceError(sequence_id=5, message="later", reason=99999),  # type: ignore[arg-type]
            ],
            prompt_logprobs=[pb.SequencePromptLogprobs(sequence_id=1, logprobs=part)],
            accepted=[
                pb.AcceptedTokens(sequence_id=1, token_ids=[5], logprobs=[logprobs]),
                pb.AcceptedTokens(sequence_id=2, token_ids=[6, 7]),
            ],
            draft_token_count=4,
        )
    )
    assert (result.step_id, result.sequence_ids, result.token_ids) == (4, [1, 2], [9, 8])
    assert result.stopped_sequence_ids == {2}
    assert result.logprobs == {1: logprobs}
    assert result.errors == {3: "bad", 4: "asked", 5: "later"}
    assert result.error_reasons == {4: "GRAMMAR_INVALID", 5: "SEQUENCE_FAILED"}
    assert result.prompt_logprobs == [(1, PromptLogprobs(2, 3, part))]
    assert result.accepted == {1: [(5, logprobs)], 2: [(6, None), (7, None)]}
    assert result.num_draft_tokens == 4


def test_only_the_first_sequence_is_asked_for_what_of_the_prompt_is_left() -> None:
    core = scheduler()
    sampling = replace(SAMPLING, prompt_logprobs=0)
    first, _ = core.add_request(Request("r1", [5, 6, 7], 10, n=2, sampling=sampling, scores_prompt=True))
    first.scored = 2
    asked = []
    for _ in range(2):
        plan = core.schedule()
        assert plan is not None
        (new,) = step_message(plan, 1).new_sequences
        asked.append((new.sampling.HasField("prompt_logprobs"), new.prompt_logprob_start))
    assert asked == [(True, 2), (False, 3)]


def test_accepted_tokens_without_their_log_probabilities_are_the_workers_fault() -> None:
    entry = pb.AcceptedTokens(sequence_id=1, token_ids=[5, 6], logprobs=[common_pb2.PositionLogprobs()])
    with pytest.raises(StepwireError, match="1 log-probabilities for 2 accepted"):
        step_result(pb.StepResult(step_id=4, sequence_ids=[1], token_ids=[9], accepted=[entry]))


def test_drafts_and_limits_are_sent_of_those_that_speculate() -> None:
    core = scheduler()
    core.add_request(Request("plain", [5], 10, sampling=SAMPLING))
    core.add_request(Request("drafts", [5, 6], 10, sampling=SAMPLING, max_draft_tokens=3))
    first, second = core.schedule(), core.schedule()
    assert first is not None and second is not None
    assert [new.token_limit for new in step_message(first, 1).new_sequences] == [0, 12]
    assert not step_message(first, 1).draft_token_counts
    core.apply(StepResult(1, first.sequence_ids, [7, 7]))
    third = core.schedule()
    assert third is not None
    assert list(step_message(second, 1).draft_token_counts) == [0, 2]
    assert (step_message(second, 1).applied_step_id, step_message(third, 1).applied_step_id) == (0, 1)
