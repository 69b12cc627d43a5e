"""Messages of WorkerService to the engine's values and back."""

from collections.abc import Sequence

from scheduler_service.core.plan import NewSequence, PromptLogprobs, StepPlan, StepResult
from scheduler_service.engine.ports import (
    LoadPhase,
    LoadSummary,
    Phase,
    ProfileRow,
    RankProfile,
    StepTimings,
    WorkerStatus,
)
from scheduler_service.engine.values import Sampling
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1.errors_pb2 import ErrorReason


def step_message(plan: StepPlan, epoch: int) -> pb.Step:
    """The message of a step, column by column."""
    step = pb.Step(epoch=epoch, step_id=plan.step_id)
    step.sequence_ids.extend(plan.sequence_ids)
    step.scheduled_token_counts.extend(plan.scheduled_token_counts)
    step.computed_token_counts.extend(plan.computed_token_counts)
    step.new_block_counts.extend(plan.new_block_counts)
    step.new_block_ids.extend(plan.new_block_ids)
    step.finished_sequence_ids.extend(plan.finished_sequence_ids)
    step.preempted_sequence_ids.extend(plan.preempted_sequence_ids)
    step.new_sequences.extend([new_sequence_message(new) for new in plan.new_sequences])
    step.applied_step_id = plan.applied_step_id
    step.traced = plan.is_traced
    if plan.draft_counts:
        step.draft_token_counts.extend([plan.draft_counts.get(sequence_id, 0) for sequence_id in plan.sequence_ids])
    return step


def new_sequence_message(new: NewSequence) -> pb.NewSequence:
    """All that a worker needs to know of a sequence. Raises TypeError for sampling of another kind."""
    sequence, request = new.sequence, new.sequence.request
    sampling = request.sampling
    if not isinstance(sampling, Sampling):
        raise TypeError(f"the sampling of request {request.request_id} is {type(sampling).__name__}")
    return pb.NewSequence(
        sequence_id=new.sequence_id,
        request_id=request.request_id,
        token_ids=new.token_ids,
        prompt_token_count=sequence.prompt_token_count,
        sampling=pb.SequenceSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            seed=sampling.seed,
            sequence_index=sequence.index,
            logprobs=sampling.logprobs,
            typical_p=sampling.typical_p,
            biased_token_ids=[token_id for token_id, _ in sampling.logit_bias],
            biases=[bias for _, bias in sampling.logit_bias],
            allowed_token_ids=sampling.allowed_token_ids,
            banned_token_ids=sampling.banned_token_ids,
            prompt_logprobs=sampling.prompt_logprobs if sequence.scored < sequence.prompt_token_count else None,
        ),
        block_ids=new.block_ids,
        traceparent=request.trace,
        adapter=request.adapter,
        prompt_logprob_start=sequence.scored,
        token_limit=sequence.kv_limit + 1 if request.max_draft_tokens else 0,
        grammar_key=sampling.grammar_key,
    )


def step_result(result: pb.StepResult) -> StepResult:
    """What a worker answered to a step."""
    return StepResult(
        step_id=result.step_id,
        sequence_ids=list(result.sequence_ids),
        token_ids=list(result.token_ids),
        stopped_sequence_ids=frozenset(result.stopped_sequence_ids),
        logprobs={entry.sequence_id: entry.logprobs for entry in result.logprobs},
        errors={entry.sequence_id: entry.message for entry in result.errors},
        error_reasons={entry.sequence_id: _reason(entry) for entry in result.errors if entry.reason},
        prompt_logprobs=[_prompt_logprobs(entry) for entry in result.prompt_logprobs],
        accepted={entry.sequence_id: _accepted(entry) for entry in result.accepted},
        num_draft_tokens=result.draft_token_count,
    )


def _reason(entry: pb.SequenceError) -> str:
    # A worker of another version may know reasons that this one does not.
    name = ErrorReason.Name(entry.reason) if entry.reason in ErrorReason.values() else "ERROR_REASON_SEQUENCE_FAILED"
    return name.removeprefix("ERROR_REASON_")


def _prompt_logprobs(entry: pb.SequencePromptLogprobs) -> tuple[int, PromptLogprobs]:
    # Carried on to the client as it is.
    return entry.sequence_id, PromptLogprobs(entry.logprobs.position, len(entry.logprobs.token_ids), entry.logprobs)


def _accepted(entry: pb.AcceptedTokens) -> list[tuple[int, object]]:
    logprobs: Sequence[object] = entry.logprobs or [None] * len(entry.token_ids)
    if len(logprobs) != len(entry.token_ids):
        text = f"the worker sent {len(logprobs)} log-probabilities for {len(entry.token_ids)} accepted tokens"
        raise StepwireError("WORKER_FAILED", text)
    return list(zip(entry.token_ids, logprobs, strict=True))


def step_timings(timings: pb.StepTimings) -> StepTimings:
    """Where a step's time went."""
    return StepTimings(
        timings.start_unix_ns,
        timings.queue_ns,
        timings.prepare_ns,
        timings.forward_ns,
        timings.sample_ns,
        timings.answered_unix_ns,
        timings.total_forward_ns,
    )


def load_summary(summary: pb.LoadSummary) -> LoadSummary:
    """What a rank has loaded."""
    return LoadSummary(
        fingerprint=summary.fingerprint,
        architecture=summary.architecture,
        weight_bytes=summary.weight_bytes,
        dtype=summary.dtype,
        kv_bytes_per_token=summary.kv_bytes_per_token,
        vocab_size=summary.vocab_size,
        max_position_count=summary.max_position_count,
        already_loaded=summary.already_loaded,
        duration_s=summary.duration_ns / 1e9,
        phases=tuple(LoadPhase(phase.name, phase.duration_ns / 1e9, phase.byte_count) for phase in summary.phases),
        mapped_bytes=summary.mapped_bytes,
        num_adapter_slots=summary.adapter_slot_count,
    )


def worker_status(response: pb.GetStatusResponse) -> WorkerStatus:
    """How a worker stands."""
    return WorkerStatus(
        phase=phase_of(response.phase),
        epoch=response.epoch,
        last_step_id=response.last_step_id,
        fingerprint=response.fingerprint,
        host=response.host,
        process_id=response.process_id,
        num_blocks=response.block_count,
        block_size=response.block_size,
        max_model_len=response.max_model_len,
        scheduler_id=response.scheduler_id,
    )


def rank_profile(summary: pb.ProfileSummary, trace: bytes) -> RankProfile:
    """A rank's profile, of the summary in the last message and the trace in all of them."""
    rows = tuple(ProfileRow(row.part, row.operator, row.call_count, row.cpu_ns, row.device_ns) for row in summary.rows)
    return RankProfile(summary.step_count, rows, trace)


def phase_of(phase: int) -> Phase:
    """A phase; UNKNOWN for one that we do not know."""
    return Phase(phase) if phase in Phase.__members__.values() else Phase.UNKNOWN
