from typing import Literal

import pytest
from pydantic import BaseModel, Field

from scheduler_service.settings import SchedulerSettings
from stepwire.cli.field_specs import field_specs, parse_bytes
from stepwire.supervisor.settings import SupervisorSettings
from worker_service.settings import WorkerSettings


class Example(BaseModel):
    """One field of each kind."""

    name: str = Field(min_length=1, max_length=8, description="A name.")
    num_things: int | None = Field(default=None, ge=1, le=9)
    share: float = Field(default=0.5, gt=0, le=1)
    fast: bool = True
    cache_bytes: int | None = Field(default=None, ge=1)
    addresses: list[str] = Field(default_factory=list)
    colour: Literal["red", "blue"] = "red"
    key: str | None = Field(default=None, repr=False)


SPECS = field_specs(Example)


@pytest.mark.parametrize(
    ("name", "kind", "allowed"),
    [
        ("name", "text", "text, at least 1 characters, at most 8 characters"),
        ("num_things", "integer", "an integer from 1 to 9"),
        ("share", "number", "a number above 0, at most 1"),
        ("fast", "switch", "true or false"),
        ("cache_bytes", "bytes", "a size in bytes, such as 4GiB, at least 1"),
        ("addresses", "list", "a list of texts"),
        ("colour", "text", "one of red, blue"),
    ],
)
def test_kind_and_allowed_values(name: str, kind: str, allowed: str) -> None:
    assert (SPECS[name].kind, SPECS[name].allowed) == (kind, allowed)


def test_names_defaults_and_secrets() -> None:
    assert SPECS["num_things"].flag == "--num-things"
    assert SPECS["num_things"].variable == "STEPWIRE_NUM_THINGS"
    assert SPECS["name"].required
    assert SPECS["name"].description == "A name."
    assert SPECS["addresses"].default == []
    assert [name for name, spec in SPECS.items() if spec.secret] == ["key"]


@pytest.mark.parametrize("model", [SchedulerSettings, WorkerSettings, SupervisorSettings])
def test_every_setting_is_described_and_keys_are_secret(model: type[BaseModel]) -> None:
    for spec in field_specs(model).values():
        assert spec.description.endswith("."), spec.name
        assert spec.secret == spec.name.endswith("_key"), spec.name


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("123", 123), ("8k", 8192), ("8 K", 8192), ("4GiB", 4 * 2**30), ("4gb", 4 * 10**9), ("1.5MiB", 1572864)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "k", "4X", "-1", "1 2", "4GiBs", "1e9", "٣k٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)
