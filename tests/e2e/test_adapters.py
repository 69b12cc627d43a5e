"""Adapters on a real server: what they answer, and what hostile files do at the admin's door."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from loader.adapters.adapter import open_adapter
from loader.adapters.load import load_adapter
from loader.adapters.merge import merge_adapter
from loader.checkpoint import open_checkpoint
from loader.layout import weight_slices
from loader.shares import RankPlace
from loader.weights import load_weights
from stepwire.client.admin import AdminClient
from stepwire.rpc.errors import StepwireError
from tests.support.stack import Server, serve, tiny_limits
from tests.support.tiny_adapter import ADAPTER_CONFIG, adapter_tensors, layer_modules, write_adapter
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_runner import reference_tokens

KEY = "an-admin-key-of-some-length"
PROMPT = list(range(60, 100))
NUM_TOKENS = 12
ALL_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(folder: Path, model: Path, seed: int, rank: int = 4) -> Path:
    base = open_checkpoint(model).config
    modules = layer_modules(base, *ALL_KINDS)
    tensors = adapter_tensors(base, dict.fromkeys(modules, rank), seed=seed)
    return write_adapter(folder, tensors, r=rank, target_modules=list(ALL_KINDS))


def merged_tokens(folder: Path, model: Path, adapter: Path) -> list[int]:
    """What transformers continues the prompt with, from a checkpoint with the adapter merged into it."""
    base = open_checkpoint(model)
    weights = load_weights(
        base,
        weight_slices(base.config, RankPlace()),
        dtype=torch.float32,
        progress=lambda _: None,
        cancelled=lambda: False,
    )
    merge_adapter(weights, load_adapter(open_adapter(adapter, base.config), RankPlace()))
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return reference_tokens(folder, [PROMPT], NUM_TOKENS)[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("adapters") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One adapter from the start, places for two."""
    folder = tmp_path_factory.mktemp("stack")
    first = make_adapter(folder / "first", model, 1)
    flags = [f"--adapter=first={first}", "--adapter-slots=2", "--max-adapter-rank=16", f"--admin-key={KEY}"]
    with serve(model, folder, "--dtype=float32", *tiny_limits(256, 64, *flags)) as server:
        yield server
        server.wait_idle()


@pytest.fixture
def admin(server: Server) -> Iterator[AdminClient]:
    with AdminClient(server.target, key=KEY) as client:
        yield client


def generate(server: Server, adapter: str = "") -> list[int]:
    with server.client() as client:
        answer = client.complete(PROMPT, adapter=adapter, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return list(answer.token_ids)


def test_each_request_gets_its_adapter(server: Server, admin: AdminClient, model: Path, tmp_path: Path) -> None:
    (first,) = (adapter for adapter in admin.list_adapters() if adapter.name == "first")
    expected = {"": reference_tokens(model, [PROMPT], NUM_TOKENS)[0]}
    expected["first"] = merged_tokens(tmp_path / "merged-first", model, Path(first.path))
    for number, name in enumerate(("second", "third")):
        path = make_adapter(tmp_path / name, model, number + 2, rank=3 + number)
        expected[name] = merged_tokens(tmp_path / f"merged-{name}", model, path)
        admin.load_adapter(name, str(path), timeout=60)
    names = [*expected, *expected, *reversed(expected)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda name: generate(server, name), names))
    assert answers == [expected[name] for name in names]
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    for name in ("second", "third"):
        admin.unload_adapter(name, timeout=60)
    with pytest.raises(StepwireError, match="no adapter 'third' is loaded; these are: first"):
        generate(server, "third")


def truncated(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def endless_header(path: Path) -> None:
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def deep_config(path: Path) -> None:
    (path / "adapter_config.json").write_text("[" * 100_000)


def catastrophic_pattern(path: Path) -> None:
    config = {**ADAPTER_CONFIG, "target_modules": "(.*a)*(.*b)*(.*c)*(.*d)*(.*e)*(.*f)*$x"}
    (path / "adapter_config.json").write_text(json.dumps(config))


def huge_rank(path: Path) -> None:
    (path / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, "r": 60_000}))


def pickled(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def pipe_for_weights(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")


def not_a_number(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    weights.write_bytes(bytes(data))


def circle_of_links(path: Path) -> None:
    (path / "adapter_config.json").unlink()
    (path / "adapter_config.json").symlink_to(path / "adapter_config.json")


@pytest.mark.parametrize(
    "spoil",
    [
        *(truncated, endless_header, deep_config, catastrophic_pattern, huge_rank, pickled, pipe_for_weights),
        *(not_a_number, circle_of_links),
    ],
)
def test_hostile_files_are_refused_and_harm_nobody(
    server: Server, admin: AdminClient, model: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    before = generate(server, "first")
    path = make_adapter(tmp_path / "hostile", model, 7)
    spoil(path)
    with pytest.raises(StepwireError) as caught:
        admin.load_adapter("hostile", str(path), timeout=30)
    assert caught.value.reason in ("CHECKPOINT_INVALID", "CHECKPOINT_UNSUPPORTED", "CHECKPOINT_NOT_FOUND")
    assert caught.value.metadata["file"].startswith(str(path)), caught.value.metadata
    assert [adapter.name for adapter in admin.list_adapters()] == ["first"]
    assert generate(server, "first") == before
