"""The scheduler's settings."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from scheduler_service.settings import SchedulerSettings


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in SchedulerSettings.model_fields.values())


def test_the_defaults_hold_together() -> None:
    settings = SchedulerSettings(model="m")
    assert settings.max_num_batched_tokens >= settings.max_num_seqs


def test_a_step_too_small_for_the_running_sequences_is_refused() -> None:
    with pytest.raises(ValidationError, match="must be at least max_num_seqs"):
        SchedulerSettings(model="m", max_num_seqs=100, max_num_batched_tokens=99)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(SchedulerSettings(model="m", cluster_key="secret-secret-secret"))


def test_the_admin_key_is_a_key_of_its_own_and_is_never_shown() -> None:
    settings = SchedulerSettings(model="m", admin_key="a-key-for-operators", cluster_key="a-key-for-workers")
    assert "a-key-for-operators" not in repr(settings)
    with pytest.raises(ValidationError, match="admin_key is the cluster_key"):
        SchedulerSettings(model="m", admin_key="one-key-for-both-", cluster_key="one-key-for-both-")


def test_adapters_are_named_and_their_paths_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = SchedulerSettings(model="m", adapter=["one=/a/b", "two=here/c=d"])
    assert settings.adapters == {"one": "/a/b", "two": str(tmp_path / "here/c=d")}
    for entries, text in ((["one"], "not NAME=PATH"), (["=/a"], "characters"), (["a=/a", "a=/b"], "twice")):
        with pytest.raises(ValidationError, match=text):
            SchedulerSettings(model="m", adapter=entries)
