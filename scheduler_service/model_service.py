"""One model of a scheduler process: from its settings to an engine that serves it, and its end."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError
from loader.inspection import Problem
from loader.sources.cache import Held
from loader.tokenizer import load_tokenizer
from scheduler_service.assembly import Assembled, Assembly, ServiceParts
from scheduler_service.engine.changes import all_or_none
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.grammars import GrammarChecker
from scheduler_service.engine.preflight import PHASE, check_before_start, check_failed, wish_of
from scheduler_service.engine.refusals import not_ready
from scheduler_service.engine.served import ServedModel
from scheduler_service.engine.sleep import SleepRule
from scheduler_service.engine.start import StartPlan
from scheduler_service.engine.startup_spans import startup_phase, startup_trace
from scheduler_service.engine.step_tracing import StepTraceRule
from scheduler_service.engine.template import ChatTemplate
from scheduler_service.engine.tokens import Tokens
from scheduler_service.model_settings import ModelSettings
from scheduler_service.sources import keep

_log = structlog.stdlib.get_logger(__name__)


class ModelService:
    """Starts one model and serves it with `engine`, which exists from the beginning."""

    def __init__(self, settings: ModelSettings, parts: ServiceParts) -> None:
        self.settings = settings
        service = parts.settings
        self.engine = Engine(
            settings.name,
            parts.tracer,
            service.tenant_rules,
            parts.metrics,
            StepTraceRule(service.trace_step_ratio, service.trace_slow_step),
            max_adapters=settings.max_adapters,
            sleep_rule=SleepRule(settings.sleep_running == "preempt", settings.sleep_arrivals == "refuse"),
        )
        self.engine.on_released = parts.shares.forget
        self._parts = parts
        self._assembly: Assembly | None = None
        self._template: ChatTemplate | None = None
        self._kept: Held | None = None

    @property
    def addresses(self) -> list[str]:
        """The workers that serve it now, and those that it was started with."""
        now = [port.address for replica in self.engine.replicas for port in replica.ports]
        return list(dict.fromkeys([*self.settings.workers, *now]))

    async def start(self) -> None:
        """Makes its workers ready and serves. Raises StepwireError; `leave` is then still to be called."""
        settings, tracer = self.settings, self._parts.tracer
        self._kept = await keep(settings.path)
        with structlog.contextvars.bound_contextvars(model=settings.name):
            with startup_trace(tracer, settings.path, settings.name):
                with startup_phase(tracer, PHASE):
                    checkpoint = await asyncio.to_thread(check_before_start, settings.path, wish_of(settings))
                plan = start_plan(settings, checkpoint)
                self._assembly = Assembly(settings, plan, self._parts, self.engine.adapters)
                text_side = asyncio.ensure_future(
                    asyncio.to_thread(_load_text_side, checkpoint, plan.max_model_len, settings.grammar_timeout)
                )
                # Of all replicas at once.
                groups = asyncio.ensure_future(all_or_none(map(self._assembly.start, settings.groups)))
                await all_or_none((text_side, groups))
                model = text_side.result()
                await self._begin(model, groups.result())
            self._template = model.template

    async def prepare(self) -> None:
        """Starts what makes first requests quicker."""
        if self._template is not None:
            await self._template.start()

    async def add_replica(self, addresses: Sequence[str]) -> int:
        """Serves on these workers, too; answers the replica's number. Raises StepwireError."""
        if self._assembly is None:
            raise not_ready()
        with structlog.contextvars.bound_contextvars(model=self.settings.name):
            try:
                return await self.engine.add_replica(await self._assembly.start(addresses))
            except BaseException:
                self._parts.shares.forget(addresses)
                raise

    async def leave(self) -> None:
        """Ends it, and gives its workers back: none holds anything of the model any more. Calls must have ended."""
        addresses = self.addresses
        try:
            await self.engine.close()
            if self._assembly is not None:
                await self._assembly.release()
        except TimeoutError:
            _log.warning("workers_not_released", model=self.settings.name, workers=addresses)
        finally:
            if self._assembly is not None:
                await self._assembly.close()
            self._parts.supervision.end_workers(addresses)
            self._parts.shares.forget(addresses)
            await self._release_files()

    async def close(self) -> None:
        """Ends it and leaves its workers as they are, for another scheduler. Calls must have ended."""
        await self.engine.close()
        if self._assembly is not None:
            await self._assembly.close()
        await self._release_files()

    async def _release_files(self) -> None:
        if self._kept is not None:
            await asyncio.to_thread(self._kept.release)

    async def _begin(self, model: ServedModel, assembled: Sequence[Assembled]) -> None:
        """Serves on groups that are ready."""
        settings = self.settings
        model = replace(
            model,
            max_model_len=min(each.started.max_model_len for each in assembled),
            max_draft_tokens=settings.max_draft_tokens,
        )
        with startup_phase(self._parts.tracer, "load_adapters", assembled[0].started.epoch):
            for name, path in settings.adapters.items():
                await self.engine.adapters.load(name, path)
        # What one accepts the others must be able to take over.
        num_blocks = min(each.config.num_blocks for each in assembled)
        await self.engine.begin(
            model, [replace(each, config=replace(each.config, num_blocks=num_blocks)) for each in assembled]
        )
        self._parts.supervision.serving()


def start_plan(settings: ModelSettings, checkpoint: Checkpoint) -> StartPlan:
    """What workers are to be made ready for, by the settings and what the checkpoint says of its model."""
    config = checkpoint.config
    return StartPlan(
        model_path=settings.path,
        dtype=settings.dtype,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        fingerprint=checkpoint.fingerprint,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=settings.max_model_len or config.max_position_count,
        max_sequences=settings.max_num_seqs,
        max_step_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        num_blocks=settings.num_kv_blocks,
        worker_timeout_s=settings.worker_timeout,
        fit_max_model_len=settings.fit_max_model_len,
        tensor_parallel_size=settings.tp,
        pipeline_parallel_size=settings.pp,
    )


def _load_text_side(checkpoint: Checkpoint, max_model_len: int, grammar_timeout_s: float) -> ServedModel:
    """Tokenizer, template and grammars. Blocks for a few hundred milliseconds."""
    try:
        files = load_tokenizer(checkpoint)
    except CheckpointError as error:
        raise check_failed(Problem.of(error), phase="tokenizer") from error
    config = checkpoint.config
    special = {"bos_token": files.bos_token or "", "eos_token": files.eos_token or ""}
    return ServedModel(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        tokens=Tokens(files.tokenizer, config.vocab_size),
        template=None if files.chat_template is None else ChatTemplate(files.chat_template, special),
        grammars=GrammarChecker(
            files.tokenizer.to_str(), config.vocab_size, config.eos_token_ids, time_limit_s=grammar_timeout_s
        ),
    )
