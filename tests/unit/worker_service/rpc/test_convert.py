"""Every field of a step and of its result crosses the wire."""

from dataclasses import fields

from stepwire.v1 import common_pb2
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1.errors_pb2 import ErrorReason
from worker_service.rpc.convert import step_input, step_result
from worker_service.runtime.step import Logprobs, NewSequence, PromptLogprobs, Sampling, StepInput, StepOutput


def test_a_step_arrives_whole() -> None:
    sampling = pb.SequenceSampling(
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        stop_token_ids=[7, 8],
        min_tokens=4,
        seed=2**64 - 1,
        sequence_index=2,
        logprobs=0,
        typical_p=0.5,
        biased_token_ids=[3],
        biases=[1.5],
        allowed_token_ids=[3, 4],
        banned_token_ids=[4],
        prompt_logprobs=0,
    )
    new = pb.NewSequence(
        sequence_id=2**40,
        request_id="r",
        token_ids=[1, 2, 3],
        prompt_token_count=2,
        sampling=sampling,
        block_ids=[5],
        traceparent="t",
        prompt_logprob_start=2,
        token_limit=30,
        grammar_key=b"k",
    )
    step = pb.Step(
        epoch=1,
        step_id=9,
        new_sequences=[new],
        sequence_ids=[2**40, 4],
        scheduled_token_counts=[3, 1],
        computed_token_counts=[0, 6],
        new_block_counts=[0, 1],
        new_block_ids=[11],
        finished_sequence_ids=[1],
        preempted_sequence_ids=[2],
        draft_token_counts=[0, 4],
        applied_step_id=7,
    )
    expected = StepInput(
        step_id=9,
        new_sequences=[
            NewSequence(
                2**40,
                "r",
                [1, 2, 3],
                2,
                Sampling(
                    *(0.5, 3, 0.75, 0.25, 1.5, -0.5, 2.0, (7, 8), 4, 2**64 - 1, 2, 0),
                    *(0.5, (3,), (1.5,), (3, 4), (4,), 0),
                ),
                [5],
                "t",
                2,
                token_limit=30,
                grammar_key=b"k",
            )
        ],
        sequence_ids=[2**40, 4],
        scheduled_token_counts=[3, 1],
        computed_token_counts=[0, 6],
        new_block_counts=[0, 1],
        new_block_ids=[11],
        finished_sequence_ids=[1],
        preempted_sequence_ids=[2],
        draft_token_counts=[0, 4],
        applied_step_id=7,
    )
    assert step_input(step) == expected
    assert {field.name for field in pb.SequenceSampling.DESCRIPTOR.fields} == {f.name for f in fields(Sampling)}


def test_log_probabilities_not_asked_for_are_none() -> None:
    step = pb.Step(new_sequences=[pb.NewSequence(sampling=pb.SequenceSampling())])
    sampling = step_input(step).new_sequences[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (None, None)


def test_a_result_arrives_whole() -> None:
    output = StepOutput(
        step_id=9,
        sequence_ids=[1, 2],
        token_ids=[10, 20],
        stopped_sequence_ids=[2],
        logprobs={1: Logprobs(10, -0.5, [(10, -0.5), (3, -2.0)])},
        prompt_logprobs=[(1, PromptLogprobs(3, [5, 6], [-0.5, -1.0], [7, 8], [-0.25, -0.75]))],
        errors={5: "bad", 6: "asked"},
        error_reasons={6: "GRAMMAR_INVALID"},
        accepted={1: [8, 9]},
        accepted_logprobs={1: [Logprobs(8, -1.5, []), Logprobs(9, -2.5, [])]},
        num_draft_tokens=6,
        start_unix_ns=2**60,
        prepare_ns=1,
        forward_ns=2,
        sample_ns=3,
    )
    result = step_result(output, epoch=4, queue_ns=6)
    assert pb.StepResult.FromString(result.SerializeToString()) == result
    assert (result.epoch, result.step_id) == (4, 9)
    assert (list(result.sequence_ids), list(result.token_ids)) == ([1, 2], [10, 20])
    assert list(result.stopped_sequence_ids) == [2]
    (logprobs,) = result.logprobs
    assert (logprobs.sequence_id, logprobs.logprobs.sampled.token_id) == (1, 10)
    assert [(top.token_id, top.logprob) for top in logprobs.logprobs.top] == [(10, -0.5), (3, -2.0)]
    (part,) = result.prompt_logprobs
    assert part.sequence_id == 1
    assert part.logprobs == common_pb2.PromptLogprobs(
        position=3,
        token_ids=[5, 6],
        logprobs=[-0.5, -1.0],
        top_token_ids=[7, 8],
        top_logprobs=[-0.25, -0.75],
    )
    assert [(error.sequence_id, error.message) for error in result.errors] == [(5, "bad"), (6, "asked")]
    assert [error.reason for error in result.errors] == [0, ErrorReason.ERROR_REASON_GRAMMAR_INVALID]
    (accepted,) = result.accepted
    assert (accepted.sequence_id, list(accepted.token_ids)) == (1, [8, 9])
    assert [entry.sampled.logprob for entry in accepted.logprobs] == [-1.5, -2.5]
    assert result.draft_token_count == 6
    timings = result.timings
    assert timings.start_unix_ns == 2**60
    assert (timings.queue_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns) == (6, 1, 2, 3)
