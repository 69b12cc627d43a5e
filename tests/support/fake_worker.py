"""A worker without a model, speaking the whole of WorkerService: tests of the scheduler run against it.

It checks what a scheduler sends as a real worker would, and more: KV slots hold digests of the
tokens up to them, and tokens are drawn from the slots read, so a wrong or stolen block changes every
token after it. Tokens are printable ASCII characters of the tokenizer given, unless a script says
otherwise.
"""

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
from tokenizers import Tokenizer

from stepwire.rpc.errors import StepwireError
from stepwire.rpc.server import add_standard_services, create_server
from stepwire.v1 import common_pb2, worker_pb2_grpc
from stepwire.v1 import worker_pb2 as pb
from stepwire.v1.errors_pb2 import ErrorReason

# What a rank's profile holds, in the form of torch's profiler.
FAKE_TRACE = {
    "baseTimeNanoseconds": 1_000_000_000_000_000_000,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 5, "args": {"name": "device"}},
        {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 5, "ts": 2_000_000.5, "dur": 30.25, "args": {}},
    ],
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter_ids(tokenizer: Tokenizer) -> list[int]:
    """The token of each letter."""
    return [tokenizer.token_to_id(letter) for letter in LETTERS]


def digest(parent: bytes, token_id: int) -> bytes:
    """What a KV slot holds, given the slot before it."""
    return hashlib.blake2b(parent + token_id.to_bytes(4, "little"), digest_size=8).digest()


def draw(slot: bytes, seed: int, index: int, choices: Sequence[int]) -> int:
    """The token sampled after a slot."""
    key = slot + seed.to_bytes(8, "little") + bytes([index])
    return choices[int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % len(choices)]


def logprob_of(slot: bytes, token_id: int) -> float:
    """The log-probability of the token sampled after a slot: a multiple of 1/64, so that sums are exact."""
    return -(digest(slot, token_id)[0] + 1) / 64


def expected_scores(prompt: Sequence[int]) -> list[float]:
    """The log-probability of each token of a prompt but the first."""
    slot, scores = b"", []
    for before, token_id in pairwise(prompt):
        slot = digest(slot, before)
        scores.append(logprob_of(slot, token_id))
    return scores


def expected_tokens(
    prompt: Sequence[int], num: int, choices: Sequence[int], *, seed: int, index: int = 0, adapter: str = ""
) -> list[int]:
    """The first tokens of a sequence to which nothing happens and for which no stop token is drawn."""
    slot = adapter.encode()
    for token_id in prompt:
        slot = digest(slot, token_id)
    output: list[int] = []
    for _ in range(num):
        output.append(draw(slot, seed, index, choices))
        slot = digest(slot, output[-1])
    return output


@dataclass(slots=True)
class FakeSequence:
    """One sequence as a worker knows it."""

    new: pb.NewSequence
    token_ids: list[int]
    block_ids: list[int]
    computed: int
    is_stopped: bool = False
    is_without_adapter: bool = False
    scored: int = 0


def first_slot(sequence: FakeSequence) -> bytes:
    """What stands before the first KV slot: an adapter changes all that follows."""
    return sequence.new.adapter.encode()


@dataclass
class FakeWorker:
    """The worker's behaviour; the fields below the blank line are what tests turn.

    `delays` are the seconds that the RPC of a phase takes.
    `scripts` gives a request's output tokens, `failures` the error of an RPC or, as "step 3", of a
    step; `adapter_contents` what lies at an adapter's path, where others hold nothing;
    `sequence_failures` the requests whose sequences fail at once, for `failure_reason`,
    `step_failures` those whose steps fail whole. `before` is called with the name of every RPC.
    """

    choices: Sequence[int]
    vocab_size: int = 320
    available_blocks: int = 1 << 20
    kv_bytes_per_token: int = 64
    max_position_count: int = 512
    fingerprint: str = "fake"
    adapter_slots: int = 2
    adapter_contents: dict[str, str] = field(default_factory=dict)
    architecture: str = "LlamaForCausalLM"
    process_id: int = 4711
    device_id: str = ""
    memory_percent: int = 90
    """What it may use of its device's memory, in percent."""

    scripts: dict[str, list[int]] = field(default_factory=dict)
    failures: dict[str, StepwireError] = field(default_factory=dict)
    sequence_failures: dict[str, str] = field(default_factory=dict)
    failure_reason: ErrorReason = ErrorReason.ERROR_REASON_UNSPECIFIED
    step_failures: dict[str, StepwireError] = field(default_factory=dict)
    step_delay_s: float = 0.0
    load_delay_s: float = 0.0
    delays: dict[str, float] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    device_gate: asyncio.Event = field(default_factory=asyncio.Event)
    adapter_gate: asyncio.Event = field(default_factory=asyncio.Event)
    grammar_gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_mute: bool = False
    before: Callable[[str], None] | None = None

    epoch: int = 0
    scheduler_id: str = ""
    place: tuple[int, int] = (0, 0)
    meetings: list[str] = field(default_factory=list)
    """Where it was told to meet others, by each InitDevice."""
    is_placed: bool = False
    is_output: bool = True
    phase: int = pb.PHASE_STARTING
    measured: tuple[int, int] = (0, 0)
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    last_step_id: int = 0
    sleep_level: int = 0
    steps: list[pb.Step] = field(default_factory=list)
    sequences: dict[int, FakeSequence] = field(default_factory=dict)
    slots: dict[tuple[int, int], bytes] = field(default_factory=dict)
    adapters: dict[str, pb.HeldAdapter] = field(default_factory=dict)
    grammars: dict[bytes, pb.PrepareGrammarRequest] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()
        self.device_gate.set()
        self.adapter_gate.set()
        self.grammar_gate.set()

    def forget(self) -> None:
        """What is left in a new process: nothing. What tests turn stays."""
        self.epoch = self.num_blocks = self.block_size = self.max_model_len = self.last_step_id = 0
        self.scheduler_id, self.phase, self.measured = "", pb.PHASE_STARTING, (0, 0)
        self.process_id += 1
        self.sequences.clear()
        self.slots.clear()
        self.adapters.clear()
        self.grammars.clear()

    def execute(self, step: pb.Step) -> pb.StepResult:
        """Runs a step. Raises StepwireError STATE_MISMATCH for one that no correct scheduler sends."""
        _require(not self.sleep_level, "it sleeps")
        _require(step.step_id == self.last_step_id + 1, f"step {step.step_id} after {self.last_step_id}")
        self.last_step_id = step.step_id
        self.steps.append(step)
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            _require(sequence_id in self.sequences, f"sequence {sequence_id} is not known")
            del self.sequences[sequence_id]
        self._take_columns(step)
        self._check_owners(dict(zip(step.sequence_ids, step.scheduled_token_counts, strict=True)))
        for sequence_id in step.sequence_ids:
            if (failure := self.step_failures.get(self.sequences[sequence_id].new.request_id)) is not None:
                raise failure
        result = pb.StepResult(epoch=self.epoch, step_id=step.step_id)
        in_use = {sequence.new.adapter for sequence in self.sequences.values()} - {""}
        _require(len(in_use) <= self.adapter_slots, f"{len(in_use)} adapters are in use at once")
        for sequence_id, num in zip(step.sequence_ids, step.scheduled_token_counts, strict=True):
            self._advance(self.sequences[sequence_id], num, result)
        return result

    def _take_columns(self, step: pb.Step) -> None:
        computed_of = dict(zip(step.sequence_ids, step.computed_token_counts, strict=True))
        _require(len(computed_of) == len(step.sequence_ids), "a sequence is twice in a step")
        for new in step.new_sequences:
            _require(new.sequence_id not in self.sequences, f"sequence {new.sequence_id} is known already")
            _require(not new.grammar_key or new.grammar_key in self.grammars, "the grammar was not prepared")
            _require(len(new.token_ids) < self.max_model_len, "longer than max_model_len")
            self.sequences[new.sequence_id] = FakeSequence(
                new, list(new.token_ids), list(new.block_ids), computed_of[new.sequence_id]
            )
            held = not new.adapter or new.adapter in self.adapters
            self.sequences[new.sequence_id].is_without_adapter = not held
        added = iter(step.new_block_ids)
        for sequence_id, num in zip(step.sequence_ids, step.new_block_counts, strict=True):
            sequence = self.sequences.get(sequence_id)
            _require(sequence is not None, f"sequence {sequence_id} is not known")
            sequence.block_ids += [next(added) for _ in range(num)]
            _require(sequence.computed == computed_of[sequence_id], f"computed count of sequence {sequence_id}")
        _require(next(added, None) is None, "more blocks than new_block_counts say")

    def _check_owners(self, scheduled: Mapping[int, int]) -> None:
        """No block that a sequence will still write after this step may be held by another one."""
        holders: dict[int, list[FakeSequence]] = {}
        for sequence in self.sequences.values():
            for block_id in sequence.block_ids:
                _require(0 <= block_id < self.num_blocks, f"block {block_id} does not exist")
                holders.setdefault(block_id, []).append(sequence)
        for sequence_id, sequence in self.sequences.items():
            if not sequence.is_stopped:
                filled = (sequence.computed + scheduled.get(sequence_id, 0)) // self.block_size
                for block_id in sequence.block_ids[filled:]:
                    _require(len(holders[block_id]) == 1, f"block {block_id} is writable and shared")

    def _advance(self, sequence: FakeSequence, num: int, result: pb.StepResult) -> None:
        sequence_id, request_id = sequence.new.sequence_id, sequence.new.request_id
        if sequence.is_stopped:
            sequence.computed += num
            return
        if sequence.is_without_adapter:
            self.sequence_failures.setdefault(request_id, f"adapter {sequence.new.adapter!r} is not held")
        if request_id in self.sequence_failures:
            sequence.is_stopped = True
            sequence.computed += num
            result.errors.append(
                pb.SequenceError(
                    sequence_id=sequence_id, message=self.sequence_failures[request_id], reason=self.failure_reason
                )
            )
            return
        begin = sequence.computed
        slot = self._write(sequence, num)
        if sequence.new.sampling.HasField("prompt_logprobs"):
            self._score(sequence, begin, result)
        if sequence.computed < len(sequence.token_ids):
            return
        token_id = self._sample(sequence, slot)
        sequence.token_ids.append(token_id)
        result.sequence_ids.append(sequence_id)
        result.token_ids.append(token_id)
        if token_id in sequence.new.sampling.stop_token_ids:
            sequence.is_stopped = True
            result.stopped_sequence_ids.append(sequence_id)
        if sequence.new.sampling.HasField("logprobs"):
            sampled = common_pb2.TokenLogprob(token_id=token_id, logprob=logprob_of(slot, token_id))
            values = common_pb2.PositionLogprobs(sampled=sampled, top=[sampled] * sequence.new.sampling.logprobs)
            result.logprobs.append(pb.SequenceLogprobs(sequence_id=sequence_id, logprobs=values))

    def _score(self, sequence: FakeSequence, begin: int, result: pb.StepResult) -> None:
        first = sequence.scored or sequence.new.prompt_logprob_start
        if first == sequence.new.prompt_token_count:
            return
        _require(begin < first, f"position {first} of a prompt cannot be told of")
        last = min(sequence.computed + 1, sequence.new.prompt_token_count)
        if last <= first:  # It computes again what a preemption took, and has been told of already.
            return
        sequence.scored = last
        token_ids = sequence.token_ids[first:last]
        slots = [self.slots[self._place(sequence, position - 1)] for position in range(first, last)]
        values = [logprob_of(slot, token_id) for slot, token_id in zip(slots, token_ids, strict=True)]
        num_top = sequence.new.sampling.prompt_logprobs
        part = common_pb2.PromptLogprobs(position=first, token_ids=token_ids, logprobs=values)
        part.top_token_ids.extend(choice for _ in token_ids for choice in self.choices[:num_top])
        part.top_logprobs.extend(value for value in values for _ in range(num_top))
        result.prompt_logprobs.append(pb.SequencePromptLogprobs(sequence_id=sequence.new.sequence_id, logprobs=part))

    def _write(self, sequence: FakeSequence, num: int) -> bytes:
        end = sequence.computed + num
        _require(num >= 1 and end <= len(sequence.token_ids), "more tokens scheduled than there are")
        _require(end <= len(sequence.block_ids) * self.block_size, "the block table is too short")
        slot = self.slots[self._place(sequence, sequence.computed - 1)] if sequence.computed else first_slot(sequence)
        for position in range(sequence.computed, end):
            slot = digest(slot, sequence.token_ids[position])
            self.slots[self._place(sequence, position)] = slot
        sequence.computed = end
        return slot

    def _place(self, sequence: FakeSequence, position: int) -> tuple[int, int]:
        return sequence.block_ids[position // self.block_size], position % self.block_size

    def _sample(self, sequence: FakeSequence, slot: bytes) -> int:
        sampling = sequence.new.sampling
        position = len(sequence.token_ids) - sequence.new.prompt_token_count
        script = self.scripts.get(sequence.new.request_id)
        if script is not None and position < len(script):
            return script[position]
        return draw(slot, sampling.seed, sampling.sequence_index, self.choices)


class FakeWorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService over a FakeWorker."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    def _enter(self, method: str, context: Any, epoch: int | None = None) -> None:
        worker = self._worker
        worker.calls.append(method)
        worker.metadata[method] = {key: value for key, value in context.invocation_metadata()}
        if worker.before is not None:
            worker.before(method)
        if method in worker.failures:
            raise worker.failures[method]
        if epoch is not None and epoch != worker.epoch:
            raise StepwireError("STALE_EPOCH", f"in epoch {worker.epoch}, called with {epoch}")

    def _need(self, method: str, phase: int) -> None:
        if self._worker.phase != phase:
            raise StepwireError("WRONG_PHASE", f"{method} needs phase {phase}, not {self._worker.phase}")

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        worker = self._worker
        if worker.is_mute:
            await asyncio.Event().wait()
        self._enter("GetStatus", context)
        return pb.GetStatusResponse(
            phase=worker.phase,  # type: ignore[arg-type]
            epoch=worker.epoch,
            last_step_id=worker.last_step_id,
            fingerprint=worker.fingerprint if worker.phase >= pb.PHASE_LOADED else "",
            sequence_count=len(worker.sequences),
            host="fakehost",
            process_id=worker.process_id,
            block_count=worker.num_blocks,
            block_size=worker.block_size,
            max_model_len=worker.max_model_len,
            scheduler_id=worker.scheduler_id,
        )

    async def InitDevice(self, request: pb.InitDeviceRequest, context: Any) -> pb.InitDeviceResponse:
        self._enter("InitDevice", context)
        worker = self._worker
        worker.meetings.append(request.rendezvous)
        await worker.device_gate.wait()
        if request.epoch != worker.epoch or worker.is_placed:
            self._need("InitDevice", pb.PHASE_STARTING)
            self._begin_epoch(request.epoch, request.scheduler_id)
        num_ranks = request.tensor_parallel_size * request.pipeline_parallel_size
        worker.place = (request.tensor_rank, request.pipeline_rank)
        worker.is_placed = bool(request.rendezvous) or num_ranks == 1
        worker.is_output = request.tensor_rank == 0 and request.pipeline_rank == request.pipeline_parallel_size - 1
        worker.phase = max(worker.phase, pb.PHASE_INITIALISED)
        return pb.InitDeviceResponse(
            device="cpu",
            device_name="fake",
            host="fakehost",
            process_id=worker.process_id,
            rendezvous=(request.rendezvous or "fake:1") if num_ranks > 1 else "",
            device_id=worker.device_id,
            total_memory_bytes=100,
            memory_limit_bytes=worker.memory_percent,
        )

    async def LoadModel(self, request: pb.LoadModelRequest, context: Any) -> AsyncIterator[pb.LoadModelResponse]:
        worker = self._worker
        await asyncio.sleep(self._worker.delays.get("LoadModel", 0.0))
        self._enter("LoadModel", context, request.epoch)
        already = worker.phase >= pb.PHASE_LOADED
        for part in range(3):
            if worker.load_delay_s:
                try:
                    await asyncio.sleep(worker.load_delay_s / 3)
                except asyncio.CancelledError:
                    worker.calls.append("LoadModel cancelled")
                    raise
            yield pb.LoadModelResponse(stage="read", loaded_bytes=part * 100, total_bytes=200)
        if "LoadModel at end" in worker.failures:
            raise worker.failures["LoadModel at end"]
        worker.phase = max(worker.phase, pb.PHASE_LOADED)
        summary = pb.LoadSummary(
            fingerprint=worker.fingerprint,
            architecture=worker.architecture,
            weight_bytes=200,
            dtype="float32",
            kv_bytes_per_token=worker.kv_bytes_per_token,
            vocab_size=worker.vocab_size,
            max_position_count=worker.max_position_count,
            already_loaded=already,
            duration_ns=1,
            adapter_slot_count=worker.adapter_slots,
        )
        yield pb.LoadModelResponse(stage="attach", loaded_bytes=200, total_bytes=200, summary=summary)

    async def DetermineAvailableMemory(
        self, request: pb.DetermineAvailableMemoryRequest, context: Any
    ) -> pb.DetermineAvailableMemoryResponse:
        worker = self._worker
        await asyncio.sleep(self._worker.delays.get("DetermineAvailableMemory", 0.0))
        self._enter("DetermineAvailableMemory", context, request.epoch)
        asked = request.max_step_token_count, request.max_sequence_count
        if worker.phase == pb.PHASE_LOADED or worker.measured != asked:
            self._need("DetermineAvailableMemory", pb.PHASE_LOADED)
        worker.measured = asked
        return pb.DetermineAvailableMemoryResponse(
            available_bytes=worker.available_blocks * worker.kv_bytes_per_token * 16, limit_bytes=1 << 40
        )

    async def InitializeCache(self, request: pb.InitializeCacheRequest, context: Any) -> pb.InitializeCacheResponse:
        worker = self._worker
        await asyncio.sleep(self._worker.delays.get("InitializeCache", 0.0))
        self._enter("InitializeCache", context, request.epoch)
        asked = request.block_count, request.block_size, request.max_model_len
        if worker.phase >= pb.PHASE_CACHED and (worker.num_blocks, worker.block_size, worker.max_model_len) == asked:
            return pb.InitializeCacheResponse(cache_bytes=request.block_count * request.block_size)
        self._need("InitializeCache", pb.PHASE_LOADED)
        worker.num_blocks, worker.block_size = request.block_count, request.block_size
        worker.max_model_len = request.max_model_len
        worker.phase = pb.PHASE_CACHED
        return pb.InitializeCacheResponse(cache_bytes=request.block_count * request.block_size)

    async def WarmUp(self, request: pb.WarmUpRequest, context: Any) -> AsyncIterator[pb.WarmUpResponse]:
        await asyncio.sleep(self._worker.delays.get("WarmUp", 0.0))
        self._enter("WarmUp", context, request.epoch)
        self._need("WarmUp", pb.PHASE_CACHED)
        yield pb.WarmUpResponse(done_count=0, total_count=1)
        self._worker.phase = pb.PHASE_READY
        yield pb.WarmUpResponse(done_count=1, total_count=1)

    async def StartProfile(self, request: pb.StartProfileRequest, context: Any) -> pb.StartProfileResponse:
        self._enter("StartProfile", context, request.epoch)
        self._need("StartProfile", pb.PHASE_READY)
        return pb.StartProfileResponse()

    async def StopProfile(self, request: pb.StopProfileRequest, context: Any) -> AsyncIterator[pb.StopProfileResponse]:
        self._enter("StopProfile", context, request.epoch)
        trace = gzip.compress(json.dumps(FAKE_TRACE).encode())
        yield pb.StopProfileResponse(trace=trace[:10])
        yield pb.StopProfileResponse(trace=trace[10:])
        row = pb.ProfileRow(part="layer 0", operator="aten::mm", call_count=3, cpu_ns=3_000_000)
        yield pb.StopProfileResponse(summary=pb.ProfileSummary(step_count=2, rows=[row]))

    async def PrepareGrammar(self, request: pb.PrepareGrammarRequest, context: Any) -> pb.PrepareGrammarResponse:
        self._enter("PrepareGrammar", context, request.epoch)
        await self._worker.grammar_gate.wait()
        already_held = request.grammar_key in self._worker.grammars
        self._worker.grammars[request.grammar_key] = request
        return pb.PrepareGrammarResponse(already_held=already_held)

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        worker = self._worker
        self._enter("Sleep", context, request.epoch)
        self._need("Sleep", pb.PHASE_READY)
        _require(not worker.sequences, "sequences are known")
        worker.slots.clear()
        worker.sleep_level = request.level
        return pb.SleepResponse(level=request.level)

    async def WakeUp(self, request: pb.WakeUpRequest, context: Any) -> pb.WakeUpResponse:
        self._enter("WakeUp", context, request.epoch)
        self._need("WakeUp", pb.PHASE_READY)
        self._worker.sleep_level = 0
        return pb.WakeUpResponse()

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.ResetResponse:
        self._enter("Reset", context)
        self._begin_epoch(request.epoch, request.scheduler_id)
        if self._worker.sleep_level:
            self._worker.phase = min(self._worker.phase, pb.PHASE_LOADED)
        self._worker.sleep_level = 0
        self._worker.phase = min(self._worker.phase, request.to)
        if self._worker.phase < pb.PHASE_CACHED:
            self._worker.num_blocks = self._worker.block_size = self._worker.max_model_len = 0
        return pb.ResetResponse(phase=self._worker.phase)  # type: ignore[arg-type]

    async def AddAdapter(self, request: pb.AddAdapterRequest, context: Any) -> pb.AddAdapterResponse:
        worker = self._worker
        self._enter("AddAdapter", context, request.epoch)
        await worker.adapter_gate.wait()
        content = worker.adapter_contents.get(request.path)
        if content is None:
            raise StepwireError("CHECKPOINT_NOT_FOUND", f"{request.path} does not exist", {"file": request.path})
        fingerprint = hashlib.sha256(content.encode()).hexdigest()
        if request.fingerprint not in ("", fingerprint):
            raise StepwireError("CHECKPOINT_INVALID", f"{request.path} holds another adapter")
        adapter = pb.HeldAdapter(fingerprint=fingerprint, path=request.path, rank=4, byte_count=100)
        return pb.AddAdapterResponse(adapter=worker.adapters.setdefault(fingerprint, adapter))

    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, context: Any) -> pb.RemoveAdapterResponse:
        self._enter("RemoveAdapter", context, request.epoch)
        self._worker.adapters.pop(request.fingerprint, None)
        return pb.RemoveAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        self._enter("ListAdapters", context)
        return pb.ListAdaptersResponse(adapters=self._worker.adapters.values())

    async def ExecuteModel(
        self, request_iterator: AsyncIterator[pb.ExecuteModelRequest], context: Any
    ) -> AsyncIterator[pb.ExecuteModelResponse]:
        worker = self._worker
        async for request in request_iterator:
            if request.WhichOneof("message") == "open":
                self._enter("ExecuteModel", context, request.open.epoch)
                self._need("ExecuteModel", pb.PHASE_READY)
                yield pb.ExecuteModelResponse(open=pb.OpenStream(epoch=worker.epoch, last_step_id=worker.last_step_id))
                continue
            if worker.step_delay_s:
                await asyncio.sleep(worker.step_delay_s)
            await worker.gate.wait()
            failure = worker.failures.get(f"step {request.step.step_id}")
            if failure is not None:
                raise failure
            if request.step.epoch != worker.epoch:
                raise StepwireError("STALE_EPOCH", f"in epoch {worker.epoch}, step carries {request.step.epoch}")
            result = worker.execute(request.step)
            if worker.is_output:
                yield pb.ExecuteModelResponse(result=result)
            elif request.step.step_id % 8 == 0:
                yield pb.ExecuteModelResponse(result=pb.StepResult(epoch=worker.epoch, step_id=request.step.step_id))

    def _begin_epoch(self, epoch: int, scheduler_id: str) -> None:
        worker = self._worker
        if epoch <= worker.epoch:
            raise StepwireError("STALE_EPOCH", f"in epoch {worker.epoch}, asked for {epoch}")
        worker.epoch, worker.scheduler_id, worker.last_step_id = epoch, scheduler_id, 0
        worker.is_placed = False
        worker.sequences.clear()
        worker.slots.clear()


class FakeWorkerServer:
    """A FakeWorker behind a real port, within the test's event loop. `kill` breaks every connection."""

    def __init__(self, worker: FakeWorker, *, key: str | None = None) -> None:
        self.worker = worker
        self.port = 0
        self._key = key
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def start(self, tracer_provider: Any = None) -> None:
        """Begins to listen, on the port it had before, if any."""
        server = create_server(tracer_provider=tracer_provider, max_message_bytes=256 << 20, key=self._key)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(FakeWorkerServicer(self.worker), server)
        add_standard_services(server, ["stepwire.v1.WorkerService"])
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def kill(self) -> None:
        """Stops at once; calls in progress break."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def replace(self) -> None:
        """Kills the worker and starts another one in its place, which knows nothing."""
        await self.kill()
        self.worker.forget()
        await self.start()


def _require(is_true: bool, problem: str) -> None:
    if not is_true:
        raise StepwireError("STATE_MISMATCH", problem)
