"""Worker settings: defaults, bounds, and what makes them safe beyond loopback."""

from typing import Any

import pytest
from pydantic import ValidationError

from stepwire.rpc.exposure import is_loopback
from worker_service.settings import WorkerSettings


def test_defaults_are_for_one_machine() -> None:
    settings = WorkerSettings()
    assert (settings.host, settings.port, settings.device) == ("127.0.0.1", 50061, "cpu")
    assert settings.cluster_key is None and settings.scheduler_timeout is None


def test_every_field_is_described() -> None:
    assert all(field.description for field in WorkerSettings.model_fields.values())


@pytest.mark.parametrize(
    "values",
    [
        {"port": -1},
        {"port": 65536},
        {"device": "tpu"},
        {"device": "cuda:"},
        {"threads": 0},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.1},
        {"kv_cache_bytes": 0},
        {"cluster_key": ""},
        {"cluster_key": "with space"},
        {"cluster_key": "ümlaut"},
        {"scheduler_timeout": 0},
        {"trace_sample_ratio": 2},
        {"log_level": "loud"},
        {"unknown": 1},
    ],
)
def test_bounds(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        WorkerSettings(**values)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "worker-0.cluster"])
def test_beyond_loopback_key_and_roots_are_required(host: str) -> None:
    with pytest.raises(ValidationError, match="cluster_key"):
        WorkerSettings(host=host, model_roots=["/models"])
    with pytest.raises(ValidationError, match="model_roots"):
        WorkerSettings(host=host, cluster_key="k")
    assert WorkerSettings(host=host, cluster_key="k", model_roots=["/models"]).host == host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]"])
def test_loopback_needs_neither(host: str) -> None:
    assert is_loopback(host)
    assert WorkerSettings(host=host).host == host


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(WorkerSettings(cluster_key="s3cret"))
