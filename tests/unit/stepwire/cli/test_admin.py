"""`stepwire admin` against a small AdminService over real gRPC."""

import json
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from stepwire.rpc.errors import STATUS_DETAILS_KEY, StepwireError, to_status
from stepwire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, worker_pb2

KEY = "an-admin-key-of-some-length"


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Answers one state to whoever has the key; notes what it was asked of adapters."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def LoadAdapter(self, request: Any, _context: grpc.ServicerContext) -> admin_pb2.LoadAdapterResponse:
        self.asked.append(request)
        adapter = admin_pb2.Adapter(name=request.name, fingerprint="f" * 64, path=request.path, rank=8, byte_count=9)
        return admin_pb2.LoadAdapterResponse(adapter=adapter)

    def UnloadAdapter(self, request: Any, _context: grpc.ServicerContext) -> admin_pb2.UnloadAdapterResponse:
        self.asked.append(request)
        return admin_pb2.UnloadAdapterResponse()

    def LoadModel(self, request: Any, _context: grpc.ServicerContext) -> admin_pb2.AdminServiceLoadModelResponse:
        self.asked.append(request)
        model = inference_pb2.Model(name=request.name or "b", architecture="Llama", dtype="float32", block_count=9)
        return admin_pb2.AdminServiceLoadModelResponse(model=model)

    def UnloadModel(self, request: Any, _context: grpc.ServicerContext) -> admin_pb2.UnloadModelResponse:
        self.asked.append(request)
        return admin_pb2.UnloadModelResponse()

    def Sleep(self, request: Any, _context: grpc.ServicerContext) -> admin_pb2.AdminServiceSleepResponse:
        self.asked.append(request)
        return admin_pb2.AdminServiceSleepResponse(level=request.level)

    def WakeUp(self, request: Any, _context: grpc.ServicerContext) -> admin_pb2.AdminServiceWakeUpResponse:
        self.asked.append(request)
        return admin_pb2.AdminServiceWakeUpResponse()

    def ListAdapters(self, _request: Any, _context: grpc.ServicerContext) -> admin_pb2.AdminServiceListAdaptersResponse:
        adapters = [admin_pb2.Adapter(name=name, rank=4, leaving=name == "b") for name in "ab"]
        return admin_pb2.AdminServiceListAdaptersResponse(adapters=adapters)

    def GetState(self, request: admin_pb2.GetStateRequest, context: grpc.ServicerContext) -> admin_pb2.GetStateResponse:
        if ("authorization", f"Bearer {KEY}") not in list(context.invocation_metadata()):
            error = StepwireError("UNAUTHENTICATED", "no valid key")
            context.set_trailing_metadata([(STATUS_DETAILS_KEY, to_status(error).SerializeToString())])
            context.abort(error.code, error.message)
        worker = admin_pb2.WorkerState(rank=0, address="127.0.0.1:50061", host="here", process_id=17)
        ready, name = inference_pb2.MODEL_STATE_READY, request.model or "m"
        model = inference_pb2.Model(name=name, state=ready, block_count=9, free_block_count=7)
        return admin_pb2.GetStateResponse(model=model, epoch=3, workers=[worker], call_count=2, models=["m", "other"])

    def AddReplica(
        self, request: admin_pb2.AddReplicaRequest, _context: grpc.ServicerContext
    ) -> admin_pb2.AddReplicaResponse:
        return admin_pb2.AddReplicaResponse(replica=len(request.workers))

    def DrainReplica(
        self, request: admin_pb2.DrainReplicaRequest, context: grpc.ServicerContext
    ) -> admin_pb2.DrainReplicaResponse:
        if request.replica != 2:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no such replica")
        return admin_pb2.DrainReplicaResponse()


@pytest.fixture
def service() -> FakeAdmin:
    return FakeAdmin()


@pytest.fixture
def target(service: FakeAdmin) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_the_state_as_text_and_as_json(run_command: Callable[..., Any], target: str) -> None:
    done = run_command("admin", "state", "--target", target, "--admin-key", KEY)
    assert "m: ready, epoch 3" in done.stdout and "other: ready, epoch 3" in done.stdout
    assert "2 calls" in done.stdout and "7 of 9 KV blocks free" in done.stdout
    assert "127.0.0.1:50061" in done.stdout and "17" in done.stdout
    found = json.loads(run_command("admin", "state", "--json", "--target", target, "--admin-key", KEY).stdout)
    assert (found["epoch"], found["workers"][0]["process_id"], found["model"]["state"]) == (3, 17, "ready")
    done = run_command("admin", "state", "--model", "other", "--target", target, "--admin-key", KEY)
    assert "other: ready" in done.stdout and "m: ready" not in done.stdout


def test_the_key_comes_from_the_environment_too(
    run_command: Callable[..., Any], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWIRE_ADMIN_KEY", KEY)
    assert run_command("admin", "state", "--target", target).exit_code == 0


def test_what_is_wrong_is_said(run_command: Callable[..., Any], command: Any, target: str) -> None:
    done = run_command("admin", "state", "--target", target)
    assert (done.exit_code, "set STEPWIRE_ADMIN_KEY" in done.stderr) == (1, True)
    done = run_command("admin", "state", "--target", target, "--admin-key", "wrong")
    assert (done.exit_code, "has another admin key" in done.stderr) == (1, True)
    assert "has no AdminService" in command("admin", "state", "--admin-key", KEY).stderr
    done = run_command("admin", "state", "--target", "127.0.0.1:1", "--admin-key", KEY)
    assert "nobody listens on 127.0.0.1:1" in done.stderr


def test_adapters_are_loaded_listed_and_unloaded(
    run_command: Callable[..., Any], target: str, service: FakeAdmin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPWIRE_ADMIN_KEY", KEY)
    monkeypatch.setenv("STEPWIRE_TARGET", target)
    monkeypatch.chdir(tmp_path)
    assert "mine: rank 8, 9 bytes" in run_command("admin", "load-adapter", "mine", "folder").stdout
    assert run_command("admin", "unload-adapter", "mine", "--wait").stdout == "mine is unloaded\n"
    assert service.asked == [
        admin_pb2.LoadAdapterRequest(name="mine", path=str(tmp_path / "folder")),
        admin_pb2.UnloadAdapterRequest(name="mine", wait=True),
    ]
    lines = run_command("admin", "adapters").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["NAME", "RANK"], ["a", "4"], ["b", "(leaving)"]]
    assert [entry["name"] for entry in json.loads(run_command("admin", "adapters", "--json").stdout)] == ["a", "b"]


def test_workers_are_put_to_sleep_and_woken(
    run_command: Callable[..., Any], target: str, service: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWIRE_ADMIN_KEY", KEY)
    monkeypatch.setenv("STEPWIRE_TARGET", target)
    assert run_command("admin", "sleep").stdout == "the workers sleep\n"
    run_command("admin", "sleep", "--drop-weights")
    assert run_command("admin", "wake").stdout == "the workers are awake\n"
    assert service.asked == [
        admin_pb2.AdminServiceSleepRequest(level=worker_pb2.SLEEP_LEVEL_KEEP_WEIGHTS),
        admin_pb2.AdminServiceSleepRequest(level=worker_pb2.SLEEP_LEVEL_DROP_WEIGHTS),
        admin_pb2.AdminServiceWakeUpRequest(),
    ]


def test_replicas_come_and_go(run_command: Callable[..., Any], target: str) -> None:
    common = ("--target", target, "--admin-key", KEY)
    assert "replica 2 serves" in run_command("admin", "add-replica", "a:1", "b:2", *common).stdout
    assert "replica 2 holds no request" in run_command("admin", "drain-replica", "2", *common).stdout
    done = run_command("admin", "drain-replica", "5", *common)
    assert (done.exit_code, "there is no such replica" in done.stderr) == (1, True)


def test_models_are_loaded_and_unloaded(
    run_command: Callable[..., Any], target: str, service: FakeAdmin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPWIRE_ADMIN_KEY", KEY)
    monkeypatch.setenv("STEPWIRE_TARGET", target)
    monkeypatch.chdir(tmp_path)
    done = run_command("admin", "load-model", "folder", "--name", "c", "--set", "max-num-seqs=4", "--set", "dtype=auto")
    assert done.stdout == "c is served: Llama, float32, 9 KV blocks\n"
    run_command("admin", "load-model", "/m/b", "--workers", "h:1", "--workers", "h:2")
    run_command("admin", "load-model", "org/name")
    run_command("admin", "load-model", "https://h/m")
    assert run_command("admin", "unload-model", "c").stdout == "c is unloaded\n"
    run_command("admin", "unload-model", "c", "--drain", "1.5")
    load, unload = admin_pb2.AdminServiceLoadModelRequest, admin_pb2.UnloadModelRequest
    drain = duration_pb2.Duration(seconds=1, nanos=500_000_000)
    assert service.asked == [
        load(path=str(tmp_path / "folder"), name="c", settings={"max_num_seqs": "4", "dtype": "auto"}),
        load(path="/m/b", workers=["h:1", "h:2"]),
        load(path="org/name"),
        load(path="https://h/m"),
        unload(model="c"),
        unload(model="c", drain_timeout=drain),
    ]
    done = run_command("admin", "load-model", "/m/b", "--set", "tp")
    assert (done.exit_code, "'tp' is not KEY=VALUE" in done.stderr) == (2, True)
    done = run_command("admin", "load-model", "/m/b", "--set", "max-num-seqs=1", "--set", "max_num_seqs=2")
    assert (done.exit_code, "max_num_seqs is given twice" in done.stderr) == (2, True)
