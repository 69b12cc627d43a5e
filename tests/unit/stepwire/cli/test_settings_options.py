from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler_service.model_settings import ModelSettings
from scheduler_service.settings import SchedulerSettings
from stepwire.cli.errors import SettingsError
from stepwire.cli.settings_groups import SCHEDULER, SERVE, WORKER, SettingsGroup
from stepwire.cli.settings_options import Origin, Settings, gather, settings_options
from worker_service.settings import WorkerSettings


class Example(BaseModel):
    """Settings of a command that does not exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="What to serve.")
    port: int = Field(default=50051, ge=0, le=65535, description="Where to listen.")
    cache: bool = Field(default=True, description="Whether to cache.")
    cache_bytes: int | None = Field(default=None, ge=1, description="How much to cache.")
    workers: list[str] = Field(default=["a:1"], description="Who works.")
    log_level: Literal["debug", "info"] = Field(default="info", description="What to log.")
    cluster_key: str | None = Field(default=None, min_length=8, repr=False, description="A secret.")

    @model_validator(mode="after")
    def _guard(self) -> "Example":
        if self.port == 666:
            raise ValueError("port 666 needs a cluster_key")
        return self


GROUP = SettingsGroup("worker", {Example: list(Example.model_fields)})


def settings(
    flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, config: Path | None = None
) -> Settings:
    return gather(GROUP, {"model": "m", **(flags or {})}, environ or {}, str(config) if config else None)


def refusal(**kwargs: object) -> str:
    with pytest.raises(SettingsError) as raised:
        settings(**kwargs).build(Example)  # type: ignore[arg-type]
    assert raised.value.exit_code == 2
    return str(raised.value.message)


def test_flag_over_variable_over_file_over_default(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("port = 3\n")
    variable = {"STEPWIRE_PORT": "2"}
    cases = [
        (settings({"port": "1"}, variable, path), 1, Origin("flag", "--port")),
        (settings({}, variable, path), 2, Origin("variable", "STEPWIRE_PORT")),
        (settings({}, {}, path), 3, Origin("file", f"port in {path}")),
        (settings({}, {"STEPWIRE_CONFIG": str(path)}), 3, Origin("file", f"port in {path}")),
        (settings(), 50051, Origin("default", "default")),
    ]
    for given, value, origin in cases:
        assert given.build(Example).port == value
        assert given.origin("port") == origin


def test_an_empty_variable_is_not_set() -> None:
    assert settings({}, {"STEPWIRE_PORT": ""}).origin("port").kind == "default"


def test_every_kind_from_text() -> None:
    environ = {
        "STEPWIRE_CACHE": "off",
        "STEPWIRE_CACHE_BYTES": "2k",
        "STEPWIRE_WORKERS": "b:1, c:2",
        "STEPWIRE_LOG_LEVEL": "debug",
    }
    built = settings({}, environ).build(Example)
    assert (built.cache, built.cache_bytes, built.workers, built.log_level) == (False, 2048, ["b:1", "c:2"], "debug")


def test_list_flags_add_up() -> None:
    assert settings({"workers": ("b:1,c:2", "d:3")}).build(Example).workers == ["b:1", "c:2", "d:3"]


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({"port": "70000"}, {}, "--port: '70000' is not allowed; port is an integer from 0 to 65535"),
        ({"port": "80x"}, {}, "--port: '80x' is not allowed; port is an integer from 0 to 65535"),
        ({}, {"STEPWIRE_CACHE": "perhaps"}, "STEPWIRE_CACHE: 'perhaps' is not allowed; cache is true or false"),
        ({}, {"STEPWIRE_CACHE_BYTES": "2q"}, "STEPWIRE_CACHE_BYTES: '2q' is not allowed; cache_bytes is a size"),
        ({"log_level": "loud"}, {}, "--log-level: 'loud' is not allowed; log_level is one of debug, info"),
        ({"port": "666"}, {}, "port 666 needs a cluster_key"),
        ({"model": None}, {}, "model is not set: give --model, STEPWIRE_MODEL or model in the settings file"),
    ],
)
def test_a_refusal_names_the_source_and_what_is_allowed(
    flags: dict[str, object], environ: dict[str, str], expected: str
) -> None:
    assert expected in refusal(flags=flags, environ=environ)


def test_a_refusal_of_the_file_names_key_and_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("port = true\n")
    assert refusal(config=path) == f"port in {path}: True is not allowed; port is an integer from 0 to 65535"
    path.write_text("[worker]\ncache_bytes = -5\n")
    assert refusal(config=path).startswith(f"[worker] cache_bytes in {path}: -5 is not allowed")


def test_all_refusals_come_at_once() -> None:
    assert len(refusal(flags={"port": "-1", "log_level": "loud"}).splitlines()) == 2


def test_a_secret_is_not_shown_in_its_refusal() -> None:
    text = refusal(environ={"STEPWIRE_CLUSTER_KEY": "hunter2"})
    assert "STEPWIRE_CLUSTER_KEY" in text
    assert "hunter2" not in text


def test_fixed_values_win_and_other_models_fields_are_left_out() -> None:
    given = gather(SERVE, {"model": "m", "port": "99", "threads": "2"}, {}, None)
    built = given.build(WorkerSettings, host="127.0.0.1", port=7)
    assert (built.port, built.threads) == (7, 2)


def test_options_reach_the_command_and_are_in_its_help() -> None:
    @click.command()
    @settings_options(GROUP)
    def command(given: Settings) -> None:
        click.echo(given.build(Example).model_dump_json())

    arguments = ["--model", "m", "--no-cache", "--workers", "x:1", "--workers", "y:2", "--cache-bytes", "1k"]
    done = CliRunner().invoke(command, arguments)
    assert '"cache":false,"cache_bytes":1024,"workers":["x:1","y:2"]' in done.output
    help_text = CliRunner().invoke(command, ["--help"]).output
    for expected in ("--model TEXT", "STEPWIRE_PORT; 50051", "--cache / --no-cache", "[debug|info]", "--config FILE"):
        assert expected in help_text


def test_serve_takes_every_setting_of_the_scheduler_but_its_workers() -> None:
    assert set(SCHEDULER.specs) - set(SERVE.specs) == {"workers"}
    of_workers = {"local_ranks", "scheduler_timeout", "rendezvous", "collective_interface"}
    assert set(WORKER.specs) - set(SERVE.specs) == of_workers


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"tenant_weights": ["a=-1"]}, "the weight of tenant 'a' must be above 0, not -1"),
        ({"tenant_max_priorities": ["b"]}, "'b' is not NAME=VALUE"),
    ],
)
def test_a_refusal_by_a_validator_of_its_own_says_why(flags: dict[str, object], reason: str) -> None:
    (name,) = flags
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}: .* is not allowed; .*: {reason}"):
        gather(SCHEDULER, {"model": "m", **flags}, {}, None).build(SchedulerSettings)


def test_a_key_that_no_metadata_can_carry_is_refused() -> None:
    key = "a" * 16 + "\n"
    with pytest.raises(SettingsError) as raised:
        gather(SCHEDULER, {"model": "m", "cluster_key": key}, {}, None).build(SchedulerSettings)
    assert key not in raised.value.message


def several(*entries: str, **flags: object) -> Settings:
    """Of `stepwire serve` with these models."""
    return gather(SERVE, {"models": entries, **flags}, {}, None)


def test_each_model_has_its_own_settings_and_those_that_are_common() -> None:
    given = several("model=/m/a,tp=2", "model=/m/b,memory_fraction=0.4,kv_cache_bytes=1k", max_num_seqs="7")
    first, second = given.each_model
    assert (first.raw("tp"), second.raw("tp")) == ("2", 1)
    assert [each.build(ModelSettings, workers=["h:1"], tp=1).max_num_seqs for each in (first, second)] == [7, 7]
    assert second.build(WorkerSettings).memory_fraction == 0.4
    assert second.build(WorkerSettings).kv_cache_bytes == 1024
    assert second.origin("memory_fraction").name == "memory_fraction of models[1] (--models)"
    alone = gather(SERVE, {"model": "m"}, {}, None)
    assert list(alone.each_model) == [alone]


def test_models_of_a_file_and_of_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("tp = 2\n[[models]]\nmodel = '/m/a'\ntp = 1\n[[models]]\nmodel = '/m/b'\nadapter = ['x=/x']\n")
    first, second = gather(SERVE, {}, {}, str(path)).each_model
    assert (first.raw("tp"), second.raw("tp"), second.raw("adapter")) == (1, 2, ["x=/x"])
    variable = {"STEPWIRE_MODELS": "model=/m/a,workers=h:1\nmodel=/m/b,workers=h:2,workers=h:3,tp=2"}
    built = gather(SCHEDULER, {}, variable, None).build(SchedulerSettings)
    assert [(model.name, model.workers) for model in built.models] == [("a", ["h:1"]), ("b", ["h:2", "h:3"])]


@pytest.mark.parametrize(
    ("entries", "flags", "text"),
    [
        (("model=/m/a,memory_fractoin=1",), {}, "did you mean memory_fraction"),
        (("model=/m/a,port=1",), {}, "port of models[0] (--models): no such setting of a model"),
        (("model=/m/a", "tp"), {}, "--models: 'tp' is not KEY=VALUE, such as model=PATH"),
        (("model=/m/a",), {"model": "/m/b"}, "--model: with models, give each of them a model in its entry"),
        (("model=/m/a",), {"adapter": ("x=/x",)}, "--adapter: with models"),
        (("model=/m/a,model=/m/b",), {}, "model of models[0] (--models): given 2 times, and it has one value"),
        (("model=/m/a", "model=/m/b,tp=1,tp=2,tp=3"), {}, "tp of models[1] (--models): given 3 times"),
    ],
)
def test_entries_that_cannot_be_are_refused(entries: tuple[str, ...], flags: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        several(*entries, **flags)
    assert text in raised.value.message


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("model = ['/m/a', '/m/b']", "model in {path}: ['/m/a', '/m/b'] is not allowed; model is text"),
        ("[[models]]\nmodel = {{a = 1}}", "model of models[0] (models in {path}): {{'a': 1}} is not allowed"),
    ],
)
def test_what_a_file_says_of_a_setting_with_one_value_is_one(tmp_path: Path, text: str, refusal: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text.format())
    with pytest.raises(SettingsError) as raised:
        gather(SERVE, {}, {}, str(path))
    assert refusal.format(path=path) in raised.value.message


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("served_model_name=a", "model of models[0] is not set"),
        ("model=/m/a,dtype=x", "dtype of models[0] (--models): 'x' is not allowed"),
        ("model=/m/a,max_num_seqs=9999", "max_num_seqs of models[0] (--models): '9999' is not allowed"),
        ("model=/m/a,max_num_seqs=600", "models[0]: max_num_batched_tokens (512) must be at least"),
    ],
)
def test_a_wrong_value_of_a_model_names_its_place(entry: str, text: str) -> None:
    (given,) = several(entry).each_model
    with pytest.raises(SettingsError) as raised:
        given.build(ModelSettings)
    assert text in raised.value.message
