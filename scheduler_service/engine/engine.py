"""The engine: one model served by its replicas, from a checked call to a stream of events."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from typing import Protocol

import structlog
from opentelemetry.trace import Tracer

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Request
from scheduler_service.engine.adapters import Adapters
from scheduler_service.engine.best_of import BestOf
from scheduler_service.engine.continuing import continue_request
from scheduler_service.engine.ending import note_end
from scheduler_service.engine.live import LiveRequest
from scheduler_service.engine.metrics import EngineMetricFamilies, EngineMetrics
from scheduler_service.engine.output import OutputStream
from scheduler_service.engine.recovery import LifePlan
from scheduler_service.engine.refusals import draining, not_ready
from scheduler_service.engine.replica import Replica, ReplicaParts
from scheduler_service.engine.replicas import Replicas
from scheduler_service.engine.served import ServedModel
from scheduler_service.engine.sleep import Sleeper, SleepRule
from scheduler_service.engine.start import StartedGroup
from scheduler_service.engine.step_tracing import StepTraceRule
from scheduler_service.engine.tenants import TenantRules
from scheduler_service.engine.tracing import RequestTrace
from scheduler_service.engine.validate import Checked, Validator
from scheduler_service.engine.values import (
    ChatPrompt,
    Event,
    GenerateInput,
    ModelInfo,
    Prompt,
    Started,
)
from stepwire.grammars import grammar_key
from stepwire.rpc.deadlines import has_passed
from stepwire.rpc.errors import StepwireError
from stepwire.telemetry import names

_log = structlog.stdlib.get_logger(__name__)


class EngineState(Enum):
    """How the engine stands."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    FAILED = "failed"


class ReadyGroup(Protocol):
    """Workers that are ready to serve a replica, with how to drive them and keep them going."""

    @property
    def started(self) -> StartedGroup: ...
    @property
    def config(self) -> SchedulerConfig: ...
    @property
    def life(self) -> LifePlan: ...


class Engine:
    """Serves one model. Exists before its workers do: calls are then refused as not ready."""

    def __init__(
        self,
        model_name: str,
        tracer: Tracer,
        tenants: TenantRules,
        metrics: EngineMetricFamilies,
        step_traces: StepTraceRule = StepTraceRule(),  # noqa: B008 - a frozen value
        *,
        max_adapters: int = 64,
        sleep_rule: SleepRule = SleepRule(),  # noqa: B008 - a frozen value
    ) -> None:
        self.model_name = model_name
        self.adapters = Adapters(max_adapters)
        self.failed: asyncio.Future[StepwireError] = asyncio.get_running_loop().create_future()
        self.on_released: Callable[[Sequence[str]], None] = lambda _addresses: None
        """Told of workers, by address, that serve the model no more while others do."""
        self._tenants = tenants
        self._metrics = EngineMetrics(
            metrics,
            model_name,
            tenants={*tenants.weights, *tenants.max_priorities},
            schedulers=lambda: [replica.scheduler for replica in self.replicas],
            is_healthy=lambda: self.is_healthy,
        )
        self._tracer = tracer
        self._step_traces = step_traces
        self._state = EngineState.STARTING
        self._failure: StepwireError | None = None
        self._refusal = draining()
        self._model: ServedModel | None = None
        self._info = ModelInfo(model_name, EngineState.STARTING.value)
        self._validator: Validator | None = None
        self._parts: ReplicaParts | None = None
        self.replicas = Replicas(on_removed=self._forget_workers, on_all_lost=self.fail)
        self.sleeper = Sleeper(self.replicas, sleep_rule, self.adapters.add_all)
        self._num_admitting = 0
        self._num_calls = 0
        self._no_calls = asyncio.Event()
        self._no_calls.set()

    # Its life.

    async def begin(self, model: ServedModel, groups: Sequence[ReadyGroup]) -> None:
        """Serves a model on workers that are ready. Raises StepwireError when their step streams cannot be opened."""
        self._model = model
        started, config = groups[0].started, groups[0].config
        self._parts = ReplicaParts(self.model_name, model, self._tracer, self._metrics, self._step_traces, self._defect)
        for group in groups:
            await self.add_replica(group)
        self._validator = Validator(
            model.vocab_size, model.max_model_len, model.eos_token_ids, self._tenants, model.max_draft_tokens
        )
        self._info = ModelInfo(
            name=self.model_name,
            state=EngineState.READY.value,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            dtype=started.summary.dtype,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=model.template is not None,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
        )
        if self._state is EngineState.STARTING:
            self._state = EngineState.READY

    async def add_replica(self, group: ReadyGroup) -> int:
        """Serves on these workers, too; see Replicas.add."""
        if self._parts is None:
            raise not_ready()
        return await self.replicas.add(self._parts, group.started, group.config, group.life)

    async def drain(self, timeout_s: float, refusal: StepwireError | None = None) -> None:
        """Takes no new requests, see `refuse`; waits until those that run are delivered, but no longer than that, then
        ends them."""
        self.refuse(refusal)
        if self.sleeper.is_down:
            # They would wait for a device that nobody wakes up any more.
            self.replicas.end_all(self._refusal)
        if not await self.wait_idle(timeout_s):
            _log.warning("drain_timeout", model=self.model_name, requests=self._num_calls, seconds=timeout_s)
            self.replicas.end_all(self._refusal)

    def refuse(self, refusal: StepwireError | None = None) -> None:
        """Takes no new requests from now on. They, and those that are ended, are told `refusal`, by default that the
        service shuts down."""
        self._refusal = refusal or self._refusal
        if self._state is not EngineState.FAILED:
            self._state = EngineState.DRAINING

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no call goes on, but no longer than that; answers whether none does."""
        try:
            await asyncio.wait_for(self._no_calls.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def fail(self, error: StepwireError) -> None:
        """Ends every request with the cause; nothing is served any more."""
        if self._state is EngineState.FAILED:
            return
        self._state, self._failure = EngineState.FAILED, error
        self.replicas.end_all(error)
        if not self.failed.done():
            self.failed.set_result(error)

    async def close(self) -> None:
        """Ends loop, group and helpers. Requests must have ended."""
        await self.sleeper.close()
        await self.adapters.close()
        await self.replicas.close()
        if self._model is not None:
            await self._model.close()
        self._metrics.close()

    # How it stands.

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken, and some replica serves; also while they sleep, when requests wait."""
        is_open = self._state is EngineState.READY and not self.sleeper.is_closed
        return is_open and any(replica.is_healthy for replica in self.replicas)

    @property
    def num_calls(self) -> int:
        """Calls of `generate` that have not ended."""
        return self._num_calls

    def model_info(self) -> ModelInfo:
        """The model and how it stands."""
        is_recovering = self._state is EngineState.READY and all(replica.is_recovering for replica in self.replicas)
        state = EngineState.RECOVERING if is_recovering else self._state
        schedulers = [replica.scheduler for replica in self.replicas]
        if state is EngineState.READY and self.sleeper.is_down:
            state = EngineState.SLEEPING
        return replace(
            self._info,
            state=state.value,
            num_blocks=sum(scheduler.config.num_blocks for scheduler in schedulers),
            num_free_blocks=sum(scheduler.num_free_blocks for scheduler in schedulers),
            num_running=sum(scheduler.num_running for scheduler in schedulers),
            num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
        )

    # What clients call.

    async def tokenize(self, prompt: Prompt | None) -> list[int]:
        """The token ids that `generate` would see."""
        validator, served = self._require_model()
        validator.check_prompt(prompt)
        return await served.token_ids(prompt)

    async def detokenize(self, token_ids: Sequence[int], *, keep_special_tokens: bool) -> str:
        """The text of token ids, of at most a context's length."""
        validator, served = self._require_model()
        validator.check_detokenize(token_ids)
        return await served.tokens.decode(token_ids, keep_special_tokens=keep_special_tokens)

    async def generate(self, call: GenerateInput) -> AsyncGenerator[Event, None]:
        """Continues a prompt: Started, then Outputs, then Finished. Raises StepwireError.

        Closing the iterator, or cancelling the task that awaits it, frees what the request holds.
        """
        arrival = time.monotonic()
        operation = names.OPERATION_CHAT if isinstance(call.prompt, ChatPrompt) else names.OPERATION_TEXT_COMPLETION
        request_id = call.request_id or secrets.token_hex(16)
        trace = RequestTrace(self._tracer, operation, self.model_name, request_id)
        live: LiveRequest | None = None
        error: StepwireError | None = StepwireError("CANCELLED", "the client went away")
        holds = ExitStack()
        self._num_calls += 1
        self._no_calls.clear()
        try:
            self._require_open()
            adapter = holds.enter_context(self.adapters.used(call.adapter))
            live, seed = await self._admit(call, request_id, trace, arrival, adapter, holds)
            yield Started(request_id, seed, self.model_name, len(live.request.prompt_token_ids))
            while (output := await live.stream.get()) is not None:
                yield output
            error = None
            yield live.finished()
        except StepwireError as raised:
            error = raised
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if call.deadline_s is not None and has_passed(
                call.deadline_s, call.deadline_s - (time.monotonic() - arrival)
            ):
                error = StepwireError("DEADLINE_EXCEEDED", "the deadline passed before the request was finished")
            raise
        except Exception as defect:
            error = StepwireError("INTERNAL", repr(defect))
            raise
        finally:
            if live is not None and live.loop is not None:
                live.loop.end(live)
            holds.close()
            self._num_calls -= 1
            if self._num_calls == 0:
                self._no_calls.set()
            self._metrics.request_ended(operation, arrival, live, error)
            note_end(self.model_name, trace, live, error)
            error = None  # its traceback leads back here

    # Admission.

    async def _admit(
        self,
        call: GenerateInput,
        request_id: str,
        trace: RequestTrace,
        arrival: float,
        adapter: str,
        holds: ExitStack,
    ) -> tuple[LiveRequest, int]:
        validator, served = self._require_model()
        checked = validator.check(call)
        # Before the work of tokenizing what the queue has no place for.
        self.replicas.check_queues(checked.num_sequences, self._num_admitting)
        self._num_admitting += checked.num_sequences
        try:
            token_ids = await served.token_ids(call.prompt)
        finally:
            self._num_admitting -= checked.num_sequences
        max_tokens = validator.max_tokens(len(token_ids), checked)
        continued = await continue_request(call, checked, token_ids, served.tokens, max_tokens)
        grammar = None
        if call.sampling.structured_output is not None:
            grammar = await served.grammars.check(call.sampling.structured_output)
            checked = checked.with_grammar(grammar_key(grammar))
        self._require_open()
        trace.describe(checked.sampling, checked.n, max_tokens)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            n=checked.num_sequences,
            priority=call.priority,
            tenant=call.tenant,
            adapter=adapter,
            # Whoever shares a prefix cache can time what others asked for.
            cache_salt=call.tenant,
            deadline=None if call.deadline_s is None else arrival + call.deadline_s,
            priors=continued.priors,
            sampling=checked.sampling,
            trace=trace.traceparent,
            scores_prompt=checked.sampling.prompt_logprobs is not None,
            max_draft_tokens=checked.max_draft_tokens,
        )
        live = _live_request(request, checked, trace, arrival)
        live.continued = continued
        if grammar is None:
            replica = self.replicas.choose(request)
        else:
            holds.callback(live.leave_grammar)
            replica = await self.replicas.choose_with(grammar, live)
            self._require_open()
        replica.loop.submit(live)
        trace.accepted(request, replica.tracing)
        self._metrics.request_admitted(live)
        return live, checked.sampling.seed

    def _forget_workers(self, replica: Replica) -> None:
        self.adapters.forget(replica.ports)
        self.on_released([port.address for port in replica.ports])

    # Refusals.

    def _require_open(self) -> None:
        if self._state is EngineState.STARTING:
            raise not_ready()
        if self._state is EngineState.DRAINING:
            raise replace(self._refusal)
        if self._state is EngineState.FAILED:
            # Each caller gets its own: an exception keeps the frames of all who raised it.
            raise replace(self._failure) if self._failure else not_ready()
        self.sleeper.require_open()

    def _require_model(self) -> tuple[Validator, ServedModel]:
        if self._validator is None or self._model is None:
            raise not_ready()
        return self._validator, self._model

    def _defect(self, error: BaseException) -> None:
        self.fail(StepwireError("INTERNAL", f"the step loop failed: {error!r}; its log has the cause"))


def _live_request(request: Request, checked: Checked, trace: RequestTrace, arrival: float) -> LiveRequest:
    best_of = None if checked.best_of is None else BestOf(checked.best_of)
    num_scored = len(request.prompt_token_ids) - 1 if request.scores_prompt else 0
    stream = OutputStream(num_scored, interval=checked.stream_interval)
    return LiveRequest(request, checked.stops, checked.sampling.min_tokens, trace, arrival, best_of, stream)
