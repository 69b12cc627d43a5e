"""Which modules a config means. The cases were held against PEFT 0.21.2, which adapted the same modules by them."""

import json
from pathlib import Path
from typing import Any

import pytest

from loader.adapters.config import read_lora_config
from loader.adapters.targets import Target, base_modules, find_targets, is_saved_by, trained_modules
from loader.checkpoint import Checkpoint
from loader.shares import RankPlace
from tests.support.tiny_adapter import ADAPTER_CONFIG

KINDS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
ALL = set(KINDS)


def targets(folder: Path, base: Checkpoint, **changes: Any) -> dict[str, Target]:
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, **changes}))
    return find_targets(read_lora_config(folder), trained_modules(base.config))


def by_layer(found: dict[str, Target]) -> list[set[str]]:
    """The kinds found in each of the two layers, and beside them whole names."""
    short = {name: kind for kind, name in KINDS.items()}
    rest = {name for name in found if ".layers." not in name}
    layers = [
        {short[name.split(".", 3)[3]] for name in found if name.startswith(f"model.layers.{n}.")} for n in range(2)
    ]
    return [*layers, rest] if rest else layers


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target_modules": ["q_proj", "mlp.down_proj"]}, [{"q", "down"}] * 2),
        ({"target_modules": ["model.layers.1.mlp.up_proj"]}, [set(), {"up"}]),
        ({"target_modules": ["proj", "_proj", "layers"]}, [set()] * 2),
        ({"target_modules": "all-linear"}, [ALL] * 2),
        ({"target_modules": ["embed_tokens", "lm_head"]}, [set(), set(), {"model.embed_tokens", "lm_head"}]),
        (
            {"target_modules": r".*layers\.\d+\.(self_attn\.(q|k)_proj|mlp\..*_proj)"},
            [{"q", "k", "gate", "up", "down"}] * 2,
        ),
        ({"target_modules": "q_proj"}, [set()] * 2),
        ({"target_modules": r".*\.0\..*"}, [ALL, set()]),
        (
            {"target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.down_proj", "o_proj"]},
            [ALL - {"down", "o"}, ALL - {"o"}],
        ),
        ({"target_modules": "all-linear", "exclude_modules": r".*(up|gate)_proj"}, [ALL - {"up", "gate"}] * 2),
        ({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]}, [set(), {"q"}]),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}, [set(), {"q"}]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": ["h"]}, [set(), set()]),
        ({"target_modules": "all-linear", "modules_to_save": ["layers.1.mlp"]}, [ALL, {"q", "k", "v", "o"}]),
    ],
)
def test_modules_are_found_as_peft_finds_them(
    tmp_path: Path, base: Checkpoint, changes: dict[str, Any], expected: list[set[str]]
) -> None:
    assert by_layer(targets(tmp_path, base, **changes)) == expected


def test_the_first_pattern_that_matches_gives_rank_and_alpha(tmp_path: Path, base: Checkpoint) -> None:
    found = targets(
        tmp_path,
        base,
        target_modules="all-linear",
        rank_pattern={"q_proj": 8, r"layers\.1\.mlp\..*": 2, "^model.layers.0.mlp.up_proj": 3, "up_proj": 5},
        alpha_pattern={"layers.0.self_attn.q_proj": 3, "down_proj": 5, "q_proj": 7},
    )
    expected = {
        "0.self_attn.q_proj": (8, 3 / 8),
        "1.self_attn.q_proj": (8, 7 / 8),
        "0.mlp.up_proj": (3, 8 / 3),
        "1.mlp.up_proj": (2, 4.0),
        "0.mlp.down_proj": (4, 5 / 4),
        "1.mlp.down_proj": (2, 5 / 2),
        "0.self_attn.k_proj": (4, 2.0),
    }
    for name, (rank, scaling) in expected.items():
        target = found[f"model.layers.{name}"]
        assert (target.rank, target.scaling) == (rank, scaling), name


def test_a_rank_of_its_own_counts_in_a_stabilised_scaling(tmp_path: Path, base: Checkpoint) -> None:
    found = targets(tmp_path, base, use_rslora=True, rank_pattern={"down_proj": 16})
    assert found["model.layers.0.self_attn.q_proj"].scaling == 8 / 2
    assert found["model.layers.0.mlp.down_proj"].scaling == 8 / 4


def test_the_head_of_a_tied_model_is_a_module_of_its_own(tied: Checkpoint) -> None:
    whole = base_modules(tied.config, RankPlace())
    assert {"model.embed_tokens", "lm_head"} <= whole.keys()
    first, last = (base_modules(tied.config, RankPlace(0, 1, stage, 2)) for stage in range(2))
    assert "model.embed_tokens" in first and "lm_head" not in first
    assert "lm_head" in last and "model.embed_tokens" not in last


def test_a_saved_module_is_meant_by_the_end_of_its_name_or_of_one_around_it() -> None:
    for entry in ("lm_head", "head", "model.layers.0.mlp", "mlp", "up_proj"):
        assert is_saved_by(entry, "lm_head") == (entry in ("lm_head", "head"))
        assert is_saved_by(entry, "model.layers.0.mlp.up_proj") == ("head" not in entry)
