"""Flight recordings as files and messages."""

import os
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from google.protobuf.message import DecodeError

from scheduler_service.core.plan import NewSequence
from scheduler_service.engine.flight import FlightRecorder, FlightStep, KnownSequence, known_sequences
from scheduler_service.rpc.worker_messages import new_sequence_message, step_message
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import flight_pb2 as pb
from stepwire.v1 import worker_pb2

SUFFIX = ".flight"
MAX_BYTES = 1 << 30
_NUM_KEPT = 8


def recording(recorder: FlightRecorder, epoch: int, reason: str) -> pb.FlightRecording:
    """The message of what a recorder keeps."""
    steps, facts = recorder.steps(), recorder.facts
    header = pb.FlightHeader(
        model_path=facts.model_path,
        fingerprint=facts.fingerprint,
        dtype=facts.dtype,
        quantize=facts.quantize,
        kv_cache_dtype=facts.kv_cache_dtype,
        block_size=facts.block_size,
        block_count=facts.num_blocks,
        max_model_len=facts.max_model_len,
        max_step_token_count=facts.max_step_tokens,
        max_sequence_count=facts.max_sequences,
        epoch=epoch,
        reason=reason,
        written_unix_ns=time.time_ns(),
        version=metadata.version("stepwire"),
    )
    message = pb.FlightRecording(
        header=header,
        sequences=[_sequence(known) for known in known_sequences(steps, facts.block_size)],
        steps=[_step(step, epoch) for step in steps],
    )
    _add_needs(message, recorder)
    return message


def write(message: pb.FlightRecording, folder: Path) -> Path:
    """Writes a recording, readable by this user alone, and removes all but the last few of the folder.

    Returns its path. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{message.header.written_unix_ns}-epoch-{message.header.epoch}{SUFFIX}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(message.SerializeToString())
    for old in sorted(folder.glob(f"*{SUFFIX}"))[:-_NUM_KEPT]:
        old.unlink(missing_ok=True)
    return path


def read(path: Path) -> pb.FlightRecording:
    """Reads a recording. Raises StepwireError FIELD_INVALID for what is none, OSError."""
    if path.stat().st_size > MAX_BYTES:
        raise _no_recording(path, f"it is larger than {MAX_BYTES} bytes")
    try:
        message = pb.FlightRecording.FromString(path.read_bytes())
    except DecodeError as error:
        raise _no_recording(path, str(error)) from None
    if not message.header.model_path or message.header.block_size < 1 or message.header.block_count < 1:
        raise _no_recording(path, "its header is missing")
    return message


def _no_recording(path: Path, why: str) -> StepwireError:
    text = f"{path} is no flight recording ({why}); give a file that ends in {SUFFIX}, as a scheduler writes it"
    return StepwireError("FIELD_INVALID", text, {"file": str(path)})


def new_sequences(message: pb.FlightRecording) -> Iterator[worker_pb2.NewSequence]:
    """Every sequence of a recording, as it was brought to the workers."""
    yield from (known.sequence for known in message.sequences)
    yield from (new for step in message.steps for new in step.step.new_sequences)


def _add_needs(message: pb.FlightRecording, recorder: FlightRecorder) -> None:
    """Adds what sequences name beside the model."""
    loaded = {info.fingerprint: info for info in recorder.adapters()}
    for fingerprint in sorted({new.adapter for new in new_sequences(message)} - {""}):
        adapter = message.adapters.add(fingerprint=fingerprint)
        if (info := loaded.get(fingerprint)) is not None:
            adapter.name, adapter.path, adapter.rank = info.name, info.path, info.rank
    texts = recorder.grammars({new.grammar_key for new in new_sequences(message)} - {b""})
    message.grammars.extend(pb.FlightGrammar(grammar_key=key, grammar=text) for key, text in sorted(texts.items()))


def _sequence(known: KnownSequence) -> pb.FlightSequence:
    new = NewSequence(known.sequence, known.sequence_id, known.token_ids, [])
    return pb.FlightSequence(
        sequence=new_sequence_message(new), computed_token_count=known.num_computed, block_count=known.num_blocks
    )


def _step(step: FlightStep, epoch: int) -> pb.FlightStep:
    message = pb.FlightStep(
        step=step_message(step.plan, epoch), sent_unix_ns=step.sent_unix_ns, answered_unix_ns=step.answered_unix_ns
    )
    result, timings = step.result, step.timings
    if result is not None and timings is not None:
        message.result.CopyFrom(
            worker_pb2.StepResult(
                epoch=epoch,
                step_id=result.step_id,
                sequence_ids=result.sequence_ids,
                token_ids=result.token_ids,
                stopped_sequence_ids=sorted(result.stopped_sequence_ids),
                accepted=[
                    worker_pb2.AcceptedTokens(sequence_id=sequence_id, token_ids=[token_id for token_id, _ in tokens])
                    for sequence_id, tokens in result.accepted.items()
                ],
                draft_token_count=result.num_draft_tokens,
                errors=[
                    worker_pb2.SequenceError(sequence_id=sequence_id, message=text)
                    for sequence_id, text in result.errors.items()
                ],
                timings=worker_pb2.StepTimings(
                    start_unix_ns=timings.start_unix_ns,
                    queue_ns=timings.queue_ns,
                    prepare_ns=timings.prepare_ns,
                    forward_ns=timings.forward_ns,
                    sample_ns=timings.sample_ns,
                ),
            )
        )
    return message
