"""A scheduler's service in the test's event loop, on a fake worker and a tiny tokenizer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from opentelemetry.trace import TracerProvider
from tokenizers import Tokenizer

from scheduler_service.assembly import Assembled
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.flight import FlightFacts, FlightRecorder
from scheduler_service.engine.grammars import GrammarChecker
from scheduler_service.engine.metrics import EngineMetricFamilies
from scheduler_service.engine.models import Models
from scheduler_service.engine.recovery import EpochObserver, LifePlan
from scheduler_service.engine.served import ServedModel
from scheduler_service.engine.sleep import SleepRule
from scheduler_service.engine.start import GroupStarter, StartPlan
from scheduler_service.engine.supervision import Supervision
from scheduler_service.engine.template import ChatTemplate
from scheduler_service.engine.tenants import TenantRules
from scheduler_service.engine.tokens import Tokens
from scheduler_service.rpc.admin.roots import Roots
from scheduler_service.rpc.admin.servicer import ADMIN_SERVICE_NAME, AdminServicer
from scheduler_service.rpc.flight_log import FlightLog
from scheduler_service.rpc.servicer import SERVICE_NAME, InferenceServicer
from scheduler_service.rpc.worker_client import WorkerClient
from stepwire.client.admin import AdminClient
from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import StepwireError, from_rpc_error
from stepwire.rpc.server import add_standard_services, bind, create_server
from stepwire.telemetry.metrics import Metrics
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import admin_pb2_grpc, inference_pb2_grpc
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.fake_worker import FakeWorker, FakeWorkerServer, letter_ids
from tests.support.tiny_checkpoint import CHAT_TEMPLATE, EOS_TOKEN_ID, tiny_tokenizer

MODEL = "tiny"
ADMIN_KEY = "an-admin-key-of-some-length"

T = TypeVar("T")


class Door:
    """What clients and operators do with a scheduler."""

    stub: Any
    address: str

    async def generate(self, timeout: float | None = 60.0, **fields: Any) -> list[pb.GenerateResponse]:
        """All messages of one call. Raises StepwireError."""
        try:
            return [response async for response in self.stub.Generate(pb.GenerateRequest(**fields), timeout=timeout)]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def error_of(self, **fields: Any) -> StepwireError:
        """The error that a call ends with."""
        try:
            await self.generate(**fields)
        except StepwireError as error:
            return error
        raise AssertionError("the call did not fail")

    async def operate(self, work: Callable[[AdminClient], T], key: str = ADMIN_KEY) -> T:
        """What `work` returns of an operator's client, in a thread beside the service. Raises StepwireError."""

        def run() -> T:
            with AdminClient(self.address, key=key) as client:
                return work(client)

        return await asyncio.to_thread(run)


@dataclass
class RunningScheduler(Door):
    """What a test needs of a scheduler that runs."""

    engine: Engine
    stub: Any
    worker: FakeWorker
    worker_server: FakeWorkerServer
    tokenizer: Tokenizer
    address: str
    metrics: Metrics
    starter: GroupStarter
    worker_servers: list[FakeWorkerServer] = field(default_factory=list)
    """One a replica; the first is `worker_server`."""

    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.engine.model_info().num_free_blocks


class _Operator:
    """Adds replicas; which models there are stays as it is."""

    def __init__(self, add_replica: Any) -> None:
        self.add_replica = add_replica

    async def load(self, settings: Any, workers: Any) -> Any:
        raise NotImplementedError

    async def unload(self, name: str, drain_s: float | None) -> None:
        raise NotImplementedError


def start_plan(**changes: Any) -> StartPlan:
    """A plan that the fake worker can satisfy."""
    plan: dict[str, Any] = {
        "model_path": "/models/tiny",
        "dtype": "auto",
        "quantize": "none",
        "fingerprint": "fake",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 320,
        "max_model_len": 512,
        "max_sequences": 8,
        "max_step_tokens": 64,
        "block_size": 16,
        "num_blocks": None,
        "worker_timeout_s": 10.0,
    }
    return StartPlan(**{**plan, **changes})


@asynccontextmanager
async def running_scheduler(
    *,
    tracer_provider: TracerProvider | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    step_timeout_s: float = 30.0,
    max_queued_requests: int = 1024,
    restart_budget: int = 3,
    supervision: Supervision | None = None,
    observers: Sequence[EpochObserver] = (),
    tenants: TenantRules | None = None,
    admin_key: str | None = None,
    flight_dir: str = "/nonexistent",
    adapter_roots: Roots = Roots("adapter_roots", (), "127.0.0.1"),  # noqa: B008 - holds nothing that changes
    max_adapters: int = 64,
    grammar_timeout_s: float = 20.0,
    num_replicas: int = 1,
    sleep_rule: SleepRule = SleepRule(),  # noqa: B008 - a frozen value
    **plan_changes: Any,
) -> AsyncIterator[RunningScheduler]:
    """A scheduler that serves; with an `admin_key` it has AdminService."""
    tokenizer = tiny_tokenizer()
    worker_servers = [FakeWorkerServer(FakeWorker(choices=letter_ids(tokenizer))) for _ in range(num_replicas)]
    for worker_server in worker_servers:
        await worker_server.start(tracer_provider)
    tracer = get_tracer(tracer_provider)
    metrics = Metrics()
    families = EngineMetricFamilies(metrics)
    engine = Engine(MODEL, tracer, tenants or TenantRules(), families, max_adapters=max_adapters, sleep_rule=sleep_rule)
    models = Models(families)
    models.add(engine)
    plan = start_plan(**plan_changes)
    clients: list[WorkerClient] = []

    async def start(addresses: Sequence[str]) -> tuple[GroupStarter, Assembled]:
        (address,) = addresses
        client = WorkerClient(address, key=None, tracer=tracer)
        clients.append(client)
        starter = GroupStarter([client], plan, tracer, supervision=supervision)
        starter.hooks.append(lambda ports: engine.adapters.add_all(ports, starter.epoch))
        started = await starter.start()
        config = SchedulerConfig(
            num_blocks=started.num_blocks,
            block_size=plan.block_size,
            max_running=plan.max_sequences,
            max_step_tokens=plan.max_step_tokens,
            max_queued_requests=max_queued_requests,
            tenant_weights={} if tenants is None else tenants.weights,
            max_running_adapters=started.summary.num_adapter_slots or None,
        )
        flight = FlightRecorder(64, FlightFacts.of(plan, started))
        log = FlightLog(flight, flight_dir)
        return starter, Assembled(
            started, config, LifePlan(starter, step_timeout_s, restart_budget, flight, [log, *observers])
        )

    async def add_replica(_model: str, addresses: Sequence[str]) -> int:
        return await engine.add_replica((await start(addresses))[1])

    keys = {} if admin_key is None else {ADMIN_SERVICE_NAME: admin_key}
    server = create_server(tracer_provider=tracer_provider, max_message_bytes=64 << 20, service_keys=keys)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(models), server)
    if keys:
        servicer = AdminServicer(models, _Operator(add_replica), adapter_roots, adapter_roots)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    add_standard_services(server, [SERVICE_NAME, *keys])
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    channel = create_channel(address, max_message_bytes=64 << 20)
    try:
        groups = [await start([worker_server.address]) for worker_server in worker_servers]
        model = ServedModel(
            architecture=plan.architecture,
            vocab_size=plan.vocab_size,
            max_model_len=plan.max_model_len,
            eos_token_ids=(EOS_TOKEN_ID,),
            tokens=Tokens(tokenizer, plan.vocab_size),
            template=None if chat_template is None else ChatTemplate(chat_template, {}, time_limit_s=1.0),
            grammars=GrammarChecker(
                tokenizer.to_str(), plan.vocab_size, (EOS_TOKEN_ID,), time_limit_s=grammar_timeout_s
            ),
        )
        await engine.begin(model, [assembled for _, assembled in groups])
        stub = InferenceServiceStub(channel)
        first = worker_servers[0]
        yield RunningScheduler(
            engine, stub, first.worker, first, tokenizer, address, metrics, groups[0][0], worker_servers
        )
    finally:
        await channel.close()
        await server.stop(None)
        await engine.close()
        for client in clients:
            await client.close()
        for worker_server in worker_servers:
            await worker_server.kill()


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits until something is true that no event tells of."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    """The text of one sequence."""
    return "".join(r.output.text for r in responses if r.HasField("output") and r.output.sequence_index == index)


def tokens_of(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    """The tokens of one sequence."""
    outputs = [r.output for r in responses if r.HasField("output") and r.output.sequence_index == index]
    return [token_id for output in outputs for token_id in output.token_ids]


def last_output(responses: list[pb.GenerateResponse], index: int = 0) -> pb.GenerateOutput:
    """The last message of one sequence."""
    return [r.output for r in responses if r.HasField("output") and r.output.sequence_index == index][-1]
