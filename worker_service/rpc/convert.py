"""Between protobuf messages and the runtime's plain values. Runs for every step, so it is kept short."""

import time

from stepwire.v1 import common_pb2, errors_pb2, worker_pb2
from worker_service.runtime.adapters import AdapterReport
from worker_service.runtime.step import Logprobs, NewSequence, PromptLogprobs, Sampling, StepInput, StepOutput


def step_input(step: worker_pb2.Step) -> StepInput:
    """A step as the model runner takes it. Checks nothing."""
    return StepInput(
        step_id=step.step_id,
        new_sequences=[_new_sequence(new) for new in step.new_sequences],
        sequence_ids=list(step.sequence_ids),
        scheduled_token_counts=list(step.scheduled_token_counts),
        computed_token_counts=list(step.computed_token_counts),
        new_block_counts=list(step.new_block_counts),
        new_block_ids=list(step.new_block_ids),
        finished_sequence_ids=list(step.finished_sequence_ids),
        preempted_sequence_ids=list(step.preempted_sequence_ids),
        draft_token_counts=list(step.draft_token_counts),
        applied_step_id=step.applied_step_id,
        is_traced=step.traced,
    )


def step_timings(output: StepOutput, *, queue_ns: int, total_forward_ns: int) -> worker_pb2.StepTimings:
    """Where the time of a step went that is answered now."""
    return worker_pb2.StepTimings(
        start_unix_ns=output.start_unix_ns,
        queue_ns=queue_ns,
        prepare_ns=output.prepare_ns,
        forward_ns=output.forward_ns,
        sample_ns=output.sample_ns,
        answered_unix_ns=time.time_ns(),
        total_forward_ns=total_forward_ns,
    )


def step_result(output: StepOutput, *, epoch: int, queue_ns: int, total_forward_ns: int = 0) -> worker_pb2.StepResult:
    """A result as the wire takes it, answered now."""
    result = worker_pb2.StepResult(
        epoch=epoch,
        step_id=output.step_id,
        sequence_ids=output.sequence_ids,
        token_ids=output.token_ids,
        stopped_sequence_ids=output.stopped_sequence_ids,
        draft_token_count=output.num_draft_tokens,
        timings=step_timings(output, queue_ns=queue_ns, total_forward_ns=total_forward_ns),
    )
    for sequence_id, logprobs in output.logprobs.items():
        result.logprobs.append(
            worker_pb2.SequenceLogprobs(sequence_id=sequence_id, logprobs=_position_logprobs(logprobs))
        )
    for sequence_id, part in output.prompt_logprobs:
        result.prompt_logprobs.append(
            worker_pb2.SequencePromptLogprobs(sequence_id=sequence_id, logprobs=_prompt_logprobs(part))
        )
    for sequence_id, token_ids in output.accepted.items():
        values = [_position_logprobs(logprobs) for logprobs in output.accepted_logprobs.get(sequence_id, ())]
        result.accepted.append(worker_pb2.AcceptedTokens(sequence_id=sequence_id, token_ids=token_ids, logprobs=values))
    for sequence_id, message in output.errors.items():
        reason = f"ERROR_REASON_{output.error_reasons.get(sequence_id, 'UNSPECIFIED')}"
        result.errors.append(
            worker_pb2.SequenceError(
                sequence_id=sequence_id, message=message, reason=errors_pb2.ErrorReason.Value(reason)
            )
        )
    return result


def held_adapter(report: AdapterReport) -> worker_pb2.HeldAdapter:
    """An adapter as the wire takes it."""
    return worker_pb2.HeldAdapter(
        fingerprint=report.fingerprint,
        path=report.path,
        rank=report.rank,
        byte_count=report.num_bytes,
        resident=report.is_resident,
        sequence_count=report.num_sequences,
    )


def _new_sequence(new: worker_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        sequence_id=new.sequence_id,
        request_id=new.request_id,
        token_ids=list(new.token_ids),
        prompt_token_count=new.prompt_token_count,
        sampling=_sampling(new.sampling),
        block_ids=list(new.block_ids),
        traceparent=new.traceparent,
        adapter=new.adapter,
        grammar_key=new.grammar_key,
        prompt_logprob_start=new.prompt_logprob_start,
        token_limit=new.token_limit,
    )


def _sampling(sampling: worker_pb2.SequenceSampling) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop_token_ids=tuple(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        sequence_index=sampling.sequence_index,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        typical_p=sampling.typical_p,
        biased_token_ids=tuple(sampling.biased_token_ids),
        biases=tuple(sampling.biases),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def _position_logprobs(logprobs: Logprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        sampled=common_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


def _prompt_logprobs(part: PromptLogprobs) -> common_pb2.PromptLogprobs:
    return common_pb2.PromptLogprobs(
        position=part.position,
        token_ids=part.token_ids,
        logprobs=part.logprobs,
        top_token_ids=part.top_token_ids,
        top_logprobs=part.top_logprobs,
    )
