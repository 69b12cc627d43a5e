import json
from typing import Any

from grpc_health.v1 import health_pb2


def test_models_as_a_table(command: Any) -> None:
    lines = command("models").stdout.splitlines()
    assert lines[0].split()[:3] == ["NAME", "STATE", "ARCHITECTURE"]
    assert lines[1].split() == ["fake", "ready", "LlamaForCausalLM", "bfloat16", "2048", "0", "0", "90", "of", "100"]


def test_models_as_json(command: Any) -> None:
    (model,) = json.loads(command("models", "--json").stdout)
    assert (model["name"], model["state"], model["num_free_blocks"]) == ("fake", "ready", 90)


def test_health_is_the_exit_status(command: Any) -> None:
    assert command("health").stdout == "SERVING\n"
    command.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    done = command("health")
    assert (done.exit_code, done.stdout) == (1, "NOT_SERVING\n")


def test_health_of_an_unknown_service_and_of_nobody(command: Any) -> None:
    done = command("health", "--service", "no.Such")
    assert (done.exit_code, "has no service 'no.Such'; a model's is" in done.stderr) == (1, True)
    command.target = "127.0.0.1:1"
    assert "nobody listens on 127.0.0.1:1" in command("health").stderr


def test_a_target_without_a_port_says_what_is_missing(command: Any) -> None:
    command.target = "stepwire"
    assert "'stepwire' names no port: give --target as HOST:PORT" in command("models").stderr
