"""The settings of one of several models."""

import os

import pytest
from pydantic import ValidationError

from scheduler_service.model_settings import ModelSettings
from scheduler_service.settings import SchedulerSettings

WORKERS = ["h:1", "h:2", "h:3", "h:4"]


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [("/m/x", None, "x"), ("/m/x.gguf", None, "x"), ("/", None, "model"), ("/m/x", "mine", "mine")],
)
def test_the_name_is_the_one_that_is_set_or_the_last_part_of_the_path(
    model: str, served: str | None, name: str
) -> None:
    assert ModelSettings(model=model, served_model_name=served).name == name


def test_a_relative_path_is_told_to_workers_as_it_is_here() -> None:
    assert ModelSettings(model="m/x").path == os.path.join(os.getcwd(), "m", "x")


def test_workers_are_grouped_by_replica() -> None:
    assert ModelSettings(model="m", tp=2, replicas=2, workers=WORKERS).groups == [WORKERS[:2], WORKERS[2:]]


def test_another_model_takes_over_what_is_no_models_own() -> None:
    first = SchedulerSettings(model="/m/a", served_model_name="a", workers=["h:1"], adapter=["x=/x"], max_num_seqs=7)
    other = first.of_another({"model": "/m/b", "workers": ["h:2"]})
    assert (other.name, other.workers, other.adapter, other.max_num_seqs) == ("b", ["h:2"], [], 7)
    assert first.of_another({"model": "/m/b", "max_num_seqs": "9"}).max_num_seqs == 9
    with pytest.raises(ValidationError, match="tp 2 x pp 1"):
        first.of_another({"model": "/m/b", "tp": 2})


def test_one_model_is_the_service_itself_and_several_have_its_settings_in_common() -> None:
    alone = SchedulerSettings(model="m", workers=["h:1"])
    assert alone.all_models == [alone]
    entries = [{"model": "/m/a", "workers": ["h:1"]}, {"model": "/m/b", "workers": ["h:2", "h:3"], "tp": 2}]
    several = SchedulerSettings.model_validate({"models": entries, "tp": 4})
    assert [model.name for model in several.all_models] == ["a", "b"]
    assert several.model == "/m/a"


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([{"model": "/m/a", "workers": ["h:1"]}, {"model": "/n/a", "workers": ["h:2"]}], "served_model_name a is that"),
        ([{"model": "/m/a", "workers": ["h:1"]}, {"model": "/m/b", "workers": ["h:1"]}], "workers h:1 is that"),
    ],
)
def test_names_and_workers_are_each_models_own(entries: object, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        SchedulerSettings.model_validate({"models": entries})


@pytest.mark.parametrize("name", ["x\0y", "x\ry", "x\ny", " x", "x ", "x\u202ey"])
def test_a_name_can_be_written_down(name: str) -> None:
    for values in ({"model": "m", "served_model_name": name}, {"model": f"/m/{name}"}):
        with pytest.raises(ValidationError, match="set served_model_name to another"):
            ModelSettings.model_validate(values)
    assert ModelSettings(model=f"/m/{name}", served_model_name='模型/a "b", c').name == '模型/a "b", c'
