"""Several models behind one door: routed by name, loaded and unloaded while others serve, lost one by one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from loader.sources.cache import ModelCache
from scheduler_service import model_service, model_services
from scheduler_service.engine.supervision import Unsupervised
from stepwire.client.types import ModelState
from stepwire.rpc.errors import StepwireError
from stepwire.v1 import inference_pb2 as pb
from tests.support.fake_worker import expected_tokens, letter_ids
from tests.support.file_server import FileServer, serve_files
from tests.support.scheduler_server import tokens_of, until
from tests.support.several_models import SeveralModels, several_models
from tests.support.tiny_checkpoint import make_tiny_llama, tiny_tokenizer

PROMPT = [40, 41, 42]
NUM_TOKENS = 40
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "restart_budget": 0, "worker_timeout": 0.5}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def door(checkpoint: Path) -> AsyncIterator[SeveralModels]:
    """Two models, and an idle worker."""
    async with several_models(checkpoint, ["a", "b"], idle=["idle"], **LIMITS) as running:
        yield running


@pytest.fixture
def elsewhere(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Serves the model over HTTP; the cache is in `tmp_path`."""
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    with serve_files() as server:
        server.files = {f"/m/tiny/{path.name}": path.read_bytes() for path in checkpoint.iterdir()}
        yield server


def sampling(num_tokens: int = NUM_TOKENS) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)


def begin(door: SeveralModels, model: str, num_tokens: int = NUM_TOKENS) -> "asyncio.Task[list[pb.GenerateResponse]]":
    prompt = pb.TokenIds(ids=PROMPT)
    return asyncio.create_task(door.generate(model=model, token_ids=prompt, sampling=sampling(num_tokens)))


async def check_whole(call: "asyncio.Task[list[pb.GenerateResponse]]", num_tokens: int = NUM_TOKENS) -> None:
    choices = letter_ids(tiny_tokenizer())
    assert tokens_of(await asyncio.wait_for(call, 10)) == expected_tokens(PROMPT, num_tokens, choices, seed=1)


async def load(door: SeveralModels, checkpoint: Path, name: str, worker: str = "idle", **settings: str) -> Any:
    address = door.workers[worker].address
    return await door.operate(
        lambda client: client.load_model(str(checkpoint), name=name, workers=[address], settings=settings)
    )


async def load_error(door: SeveralModels, checkpoint: Path, name: str, **settings: str) -> StepwireError:
    with pytest.raises(StepwireError) as caught:
        await load(door, checkpoint, name, **settings)
    return caught.value


async def unload(door: SeveralModels, name: str, drain_s: float | None = None) -> None:
    await door.operate(lambda client: client.unload_model(name, drain_s=drain_s))


async def health_of(door: SeveralModels, service: str) -> int:
    await door.health.update()
    async with grpc.aio.insecure_channel(door.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def served(door: SeveralModels) -> list[str]:
    return [model.name for model in (await door.stub.ListModels(pb.ListModelsRequest())).models]


async def test_a_request_goes_to_the_model_that_it_names_and_without_a_name_to_the_first(door: SeveralModels) -> None:
    for model, worker in (("a", "a"), ("b", "b"), ("", "a")):
        before = {name: door.worker(name).last_step_id for name in "ab"}
        call = begin(door, model)
        await check_whole(call)
        assert call.result()[0].started.model == worker
        assert door.worker(worker).last_step_id > before[worker]
        other = "ab".replace(worker, "")
        assert door.worker(other).last_step_id == before[other]


async def test_each_answers_for_itself(door: SeveralModels) -> None:
    assert await served(door) == ["a", "b"]
    assert (await door.stub.GetModel(pb.GetModelRequest(model="b"))).model.name == "b"
    assert (await door.stub.GetModel(pb.GetModelRequest())).model.name == "a"
    assert (await door.stub.Tokenize(pb.TokenizeRequest(model="b", text="x"))).token_ids
    state = await door.operate(lambda client: client.get_state(model="b"))
    assert (state.model.name, state.models, state.workers[0].address) == ("b", ("a", "b"), door.workers["b"].address)
    await door.operate(lambda client: client.sleep(model="b"))
    states = [model.state for model in (await door.stub.ListModels(pb.ListModelsRequest())).models]
    assert states == [pb.MODEL_STATE_READY, pb.MODEL_STATE_SLEEPING]
    await check_whole(begin(door, "a"))


async def test_a_model_from_elsewhere_is_brought_here_and_kept_while_it_is_served(
    door: SeveralModels, elsewhere: FileServer, tmp_path: Path
) -> None:
    url, address = f"{elsewhere.url}/m/tiny", door.workers["idle"].address
    made = await door.operate(lambda client: client.load_model(url, workers=[address]))
    assert made.name == "tiny"
    (entry,) = ModelCache(tmp_path).entries()
    assert (entry.url, entry.in_use) == (url, True)
    await check_whole(begin(door, "tiny"))
    await unload(door, "tiny")
    (entry,) = ModelCache(tmp_path).entries()
    assert not entry.in_use


@pytest.mark.parametrize(
    ("server", "reason"), [("", "CHECKPOINT_NOT_FOUND"), ("http://127.0.0.1:1", "CHECKPOINT_UNAVAILABLE")]
)
async def test_a_model_that_does_not_come_changes_nothing(
    door: SeveralModels, elsewhere: FileServer, server: str, reason: str
) -> None:
    url = f"{server or elsewhere.url}/m/none"
    with pytest.raises(StepwireError) as caught:
        await door.operate(lambda client: client.load_model(url, workers=["h:1"]))
    assert (caught.value.reason, caught.value.metadata["phase"]) == (reason, "fetch")
    assert await served(door) == ["a", "b"]


async def test_other_models_come_and_go_while_one_is_brought_here(door: SeveralModels, elsewhere: FileServer) -> None:
    elsewhere.stall_after["model.safetensors"] = 100
    url, address = f"{elsewhere.url}/m/tiny", door.workers["idle"].address
    call = asyncio.create_task(door.operate(lambda client: client.load_model(url, workers=[address])))
    await until(elsewhere.stalled.is_set)
    await unload(door, "b")
    elsewhere.go_on.set()
    assert (await call).name == "tiny"


@pytest.mark.parametrize("path", ["tiny", "file:///m/tiny", "m/\0"])
async def test_what_names_no_model_is_refused(door: SeveralModels, path: str) -> None:
    with pytest.raises(StepwireError) as caught:
        await door.operate(lambda client: client.load_model(path, workers=["h:1"]))
    assert (caught.value.reason, caught.value.metadata["field"]) == ("FIELD_INVALID", "path")


async def test_text_is_made_ready_while_workers_are(
    door: SeveralModels, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm #34956: what could be done at the same time was done one after the other."""
    made, load_text_side = threading.Event(), model_service._load_text_side

    def noted(*arguments: Any) -> Any:
        text = load_text_side(*arguments)
        made.set()
        return text

    monkeypatch.setattr(model_service, "_load_text_side", noted)
    door.worker("idle").device_gate.clear()
    started = asyncio.create_task(load(door, checkpoint, "c"))
    await until(made.is_set)
    assert not started.done()
    door.worker("idle").device_gate.set()
    assert (await started).name == "c"


async def test_an_unknown_name_is_refused_naming_those_that_there_are(door: SeveralModels) -> None:
    error = await door.error_of(model="c", text="x")
    assert (error.reason, error.code) == ("MODEL_NOT_FOUND", grpc.StatusCode.NOT_FOUND)
    assert "'c'" in error.message and "'a', 'b' are" in error.message
    for call in (lambda client: client.get_state(model="c"), lambda client: client.unload_model("c")):
        with pytest.raises(StepwireError, match="'a', 'b' are"):
            await door.operate(call)


async def test_every_metric_names_its_model_and_those_of_one_that_is_gone_are_too(door: SeveralModels) -> None:
    await check_whole(begin(door, "b"))
    await door.error_of(model="c", text="x")

    def lines(text: str) -> list[str]:
        return [line for line in generate_latest(door.metrics.registry).decode().splitlines() if text in line]

    assert lines('stepwire_requests_refused_total{model="",reason="MODEL_NOT_FOUND"} 1.0')
    assert lines('stepwire_ready{model="b"} 1.0') and lines('stepwire_steps_total{model="a"} 0.0')
    assert lines(f'stepwire_output_tokens_total{{model="b",tenant="other"}} {NUM_TOKENS}.0')
    assert lines('gen_ai_request_model="b"')
    await unload(door, "b")
    assert not lines('model="b"') and lines('model="a"')


async def test_a_model_is_loaded_beside_a_stream_that_goes_on(door: SeveralModels, checkpoint: Path) -> None:
    stream = begin(door, "a")
    await until(lambda: door.worker("a").last_step_id > 5)
    door.worker("a").gate.clear()
    model = await load(door, checkpoint, "c", max_num_seqs="4")
    assert (model.name, model.state) == ("c", ModelState.READY)
    door.worker("a").gate.set()
    assert await served(door) == ["a", "b", "c"]
    assert door.worker("idle").measured == (64, 4)
    assert await health_of(door, "stepwire.v1.InferenceService/c") == SERVING
    await check_whole(begin(door, "c"))
    await check_whole(stream)


async def test_a_model_is_unloaded_once_its_requests_have_ended(door: SeveralModels) -> None:
    door.worker("b").gate.clear()
    stream = begin(door, "b")
    await until(lambda: door.models.get("b").num_calls == 1)
    gone = asyncio.create_task(unload(door, "b"))
    await until(lambda: door.models.get("b").model_info().state == "draining")
    refused = await door.error_of(model="b", text="x")
    assert (refused.reason, "'b' is being unloaded" in refused.message) == ("DRAINING", True)
    await check_whole(begin(door, "a"))
    door.worker("b").gate.set()
    await check_whole(stream)
    await gone
    assert await served(door) == ["a"]
    assert (await door.error_of(model="b", text="x")).reason == "MODEL_NOT_FOUND"
    assert door.worker("b").calls[-1] == "Reset"
    with pytest.raises(grpc.RpcError):
        await health_of(door, "stepwire.v1.InferenceService/b")


async def test_what_does_not_end_in_time_is_ended_with_the_reason(door: SeveralModels, checkpoint: Path) -> None:
    door.worker("b").gate.clear()
    stream = begin(door, "b")
    await until(lambda: door.models.get("b").num_calls == 1)
    await unload(door, "b", 0.05)
    with pytest.raises(StepwireError, match="'b' is being unloaded"):
        await stream
    door.worker("b").gate.set()
    await load(door, checkpoint, "b", "b")
    await check_whole(begin(door, "b"))


async def test_the_last_model_may_go_and_the_first_that_comes_is_meant_by_no_name(
    door: SeveralModels, checkpoint: Path
) -> None:
    for name in "ab":
        await unload(door, name)
    assert await served(door) == []
    error = await door.error_of(text="x")
    assert (error.reason, "none is" in error.message) == ("MODEL_NOT_FOUND", True)
    assert await health_of(door, "") == NOT_SERVING
    await load(door, checkpoint, "c")
    await check_whole(begin(door, ""))
    assert await health_of(door, "") == SERVING


async def test_a_load_that_cannot_be_changes_nothing(door: SeveralModels, checkpoint: Path, tmp_path: Path) -> None:
    idle = door.workers["idle"].address
    for name, path, settings, reason, text in (
        ("a", checkpoint, {}, "MODEL_ALREADY_EXISTS", "'a' is served already"),
        ("c", tmp_path, {}, "CHECKPOINT_NOT_FOUND", "config.json"),
        ("c", checkpoint, {"tp": "2"}, "FIELD_INVALID", "tp 2 x pp 1"),
        ("c", checkpoint, {"tp": "x"}, "FIELD_INVALID", "tp: "),
        ("c", checkpoint, {"memory_fraction": "0.5"}, "FIELD_INVALID", "memory_fraction is none of the scheduler's"),
        ("c", checkpoint, {"model": "/x"}, "FIELD_INVALID", "model cannot be among them; give it as the field path"),
        ("c", checkpoint, {"adapter": "x=/x"}, "FIELD_INVALID", "load adapters with LoadAdapter"),
        ("c", Path("relative"), {}, "FIELD_INVALID", "relative"),
        ("c\r", checkpoint, {}, "FIELD_INVALID", "cannot be printed"),
        ("c", checkpoint, {"t" * 5000: "2"}, "FIELD_INVALID", "tttt... is no setting's name"),
    ):
        with pytest.raises(StepwireError) as caught:
            await door.operate(
                lambda client, name=name, path=path, settings=settings: client.load_model(
                    str(path), name=name, workers=[idle], settings=settings
                )
            )
        assert (caught.value.reason, text in caught.value.message) == (reason, True), caught.value
    with pytest.raises(StepwireError, match="these workers serve already"):
        await load(door, checkpoint, "c", "a")
    with pytest.raises(StepwireError, match="serves b already, under another address"):
        await door.operate(
            lambda client: client.load_model(
                str(checkpoint), name="c", workers=[door.workers["b"].address.replace("127.0.0.1", "localhost")]
            )
        )
    with pytest.raises(StepwireError, match="there is no supervisor"):
        await door.operate(lambda client: client.load_model(str(checkpoint), name="c"))
    assert await served(door) == ["a", "b"]
    assert not door.worker("idle").steps
    await load(door, checkpoint, "c")


class Ends(Unsupervised):
    """Notes which workers are to be ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def end_workers(self, addresses: Sequence[str]) -> None:
        self.ended += addresses


async def test_naming_workers_that_serve_ends_none_of_them(checkpoint: Path) -> None:
    supervision = Ends()
    async with several_models(checkpoint, ["a"], supervision=supervision, **LIMITS) as door:
        with pytest.raises(StepwireError, match="these workers serve already"):
            await load(door, checkpoint, "c", "a")
        assert supervision.ended == []
        await check_whole(begin(door, "a"))


async def test_no_more_models_are_loaded_than_another_scheduler_could_serve(
    door: SeveralModels, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_services, "MAX_MODELS", 2)
    error = await load_error(door, checkpoint, "c")
    assert (error.reason, "unload one first" in error.message) == ("FIELD_OUT_OF_RANGE", True)
    await unload(door, "b")
    await load(door, checkpoint, "c")


async def test_a_start_that_fails_is_one_error_and_its_worker_is_free_again(
    door: SeveralModels, checkpoint: Path
) -> None:
    door.worker("idle").failures["WarmUp"] = StepwireError("OUT_OF_MEMORY", "no room", {"remedy": "less"})
    door.worker("a").step_delay_s = 0.005
    stream = begin(door, "a")
    error = await load_error(door, checkpoint, "c")
    assert (error.reason, error.metadata["phase"]) == ("OUT_OF_MEMORY", "warm_up")
    assert "no room" in error.message
    assert door.worker("idle").calls[-1] == "Reset"
    await check_whole(stream)
    assert await served(door) == ["a", "b"]
    del door.worker("idle").failures["WarmUp"]
    await load(door, checkpoint, "c")
    await check_whole(begin(door, "c"))


async def test_changes_are_made_one_after_the_other_and_go_on_without_their_callers(
    door: SeveralModels, checkpoint: Path
) -> None:
    door.worker("idle").load_delay_s = 0.2
    with pytest.raises(StepwireError, match=r"(?i)deadline"):
        await door.operate(
            lambda client: client.load_model(
                str(checkpoint), name="c", workers=[door.workers["idle"].address], timeout=0.1
            )
        )
    second = asyncio.create_task(load_error(door, checkpoint, "c"))
    gone = asyncio.create_task(unload(door, "b"))
    assert (await second).reason == "MODEL_ALREADY_EXISTS"
    await gone
    assert await served(door) == ["a", "c"]
    await check_whole(begin(door, "c"))


async def test_a_model_that_is_lost_for_good_fails_alone(door: SeveralModels) -> None:
    door.worker("a").step_delay_s = door.worker("b").step_delay_s = 0.01
    streams = {name: begin(door, name) for name in "ab"}
    await until(lambda: all(door.worker(name).last_step_id > 3 for name in "ab"))
    await door.workers["b"].kill()
    with pytest.raises(StepwireError, match="restart_budget"):
        await streams["b"]
    await check_whole(streams["a"])
    refused = await door.error_of(model="b", text="x")
    assert (refused.reason, "restart_budget" in refused.message) == ("WORKER_FAILED", True)
    assert await health_of(door, "stepwire.v1.InferenceService/b") == NOT_SERVING
    assert await health_of(door, "stepwire.v1.InferenceService/a") == SERVING
    assert await health_of(door, "") == SERVING
    assert not door.models.failed.done()
    await door.workers["a"].kill()
    assert (await asyncio.wait_for(door.models.failed, 10)).reason == "WORKER_FAILED"
    assert await health_of(door, "") == NOT_SERVING


async def test_a_model_that_failed_may_be_unloaded_and_loaded_anew(door: SeveralModels, checkpoint: Path) -> None:
    await door.workers["b"].kill()
    await asyncio.wait_for(door.models.get("b").failed, 10)
    await unload(door, "b")
    await load(door, checkpoint, "b")
    await check_whole(begin(door, "b"))


async def test_models_that_claim_more_than_a_device_has_are_refused_naming_each(checkpoint: Path) -> None:
    on_one = {"device_id": "gpu-1", "memory_percent": 60}
    with pytest.raises(StepwireError) as caught:
        async with several_models(checkpoint, ["a", "b"], prepare={"a": on_one, "b": on_one}, **LIMITS):
            pass
    assert caught.value.reason == "OUT_OF_MEMORY"
    for text in ("gpu-1 of fakehost", "1.20", "a 0.60", "b 0.60", "memory_fraction"):
        assert text in caught.value.message


async def test_a_load_is_held_against_what_the_others_claim(checkpoint: Path) -> None:
    shares = {
        name: {"device_id": "gpu-1", "memory_percent": percent} for name, percent in {"a": 60, "b": 40, "c": 30}.items()
    }
    async with several_models(checkpoint, ["a", "b"], idle=["c"], prepare=shares, **LIMITS) as door:
        with pytest.raises(StepwireError, match=r"a 0\.60.*b 0\.40.*c 0\.30"):
            await load(door, checkpoint, "c", "c")
        assert "LoadModel" not in door.worker("c").calls
        await unload(door, "b")
        await load(door, checkpoint, "c", "c")
        await check_whole(begin(door, "c"))
