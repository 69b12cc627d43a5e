"""Opens damaged checkpoints, in a process of its own: python -m tests.support.loader_fuzz KIND SEED FIRST STOP FOLDER.

Each case follows from kind, seed and number alone. The number of the case at hand is in FOLDER/case, so that
the parent can name the one that hung or ended the process.
"""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from loader.adapters.adapter import open_adapter
from loader.adapters.load import LoadedAdapter, load_adapter
from loader.adapters.merge import merge_adapter
from loader.adapters.parts import adapter_bytes
from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.formats.slicing import Split, slice_checkpoint
from loader.inspection import Wish, inspect_checkpoint
from loader.shares import RankPlace
from loader.tokenizer import load_tokenizer
from loader.weights import WeightSlice, load_weights
from tests.support.mutations import GgufParts, damaged_bytes, damaged_json
from tests.support.slow_reader import read_slowly
from tests.support.tiny_adapter import EMBEDDING, PREFIX, adapter_tensors, layer_modules, write_adapter
from tests.support.tiny_checkpoint import TINY_FAMILIES, make_tiny_llama
from tests.support.tiny_gguf import gguf_name, make_tiny_gguf
from tests.support.tiny_trtllm import make_tiny_trtllm

KINDS = ("shards", "config", "families", "tokenizer", "gguf", "sentencepiece", "adapter", "presliced", "tensorrt-llm")
_RANK_KINDS = ("presliced", "tensorrt-llm")
_GGUF_KINDS = ("gguf", "sentencepiece")
MAX_CASE_S = 3.0
# Beside what the process has after its first loads. The files have less than half a MB.
_MAX_EXTRA_BYTES = 128 << 20
_JSON_NAMES = {
    "shards": ("model.safetensors.index.json",),
    "config": ("config.json", "config.json", "generation_config.json"),
    "tokenizer": ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
}
_TEXTS = ("Hello, 12 worlds <|im_end|>", "", " \u00e9\u4e16\0")

Damage = Callable[[random.Random], Mapping[str, bytes]]


def main(kind: str, seed: int, first: int, stop: int, folder: Path) -> None:
    """Runs the cases [first, stop). Raises at the first that ends in anything but a right load or a refusal."""
    torch.set_num_threads(1)
    make = _MAKERS.get(kind, _safetensors)
    path, damage = make(kind, folder)
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}
    reference = _load(path, kind)
    if reference is None:
        raise RuntimeError("the undamaged checkpoint is refused")
    _limit_memory()
    progress = os.open(folder / "case", os.O_CREAT | os.O_WRONLY)
    num_loaded = 0
    for number in range(first, stop):
        os.pwrite(progress, b"%012d" % number, 0)
        damaged = damage(random.Random(f"{kind} {seed} {number}"))
        for name, data in damaged.items():
            (folder / name).write_bytes(data)
        start = time.process_time()
        if _load(path, kind) is not None:
            num_loaded += 1
        if time.process_time() - start > MAX_CASE_S:
            raise TimeoutError(f"case {number} took more than {MAX_CASE_S} s of processor time")
        for name in damaged:
            (folder / name).write_bytes(sound[name])
    sys.stdout.write(f"{num_loaded} loaded\n")


def _safetensors(kind: str, folder: Path) -> tuple[Path, Damage]:
    make_tiny_llama(folder, num_layers=1, hidden_size=16, heads=2, kv_heads=1, intermediate_size=32, sharded=True)
    (folder / "special_tokens_map.json").write_text('{"pad_token": {"content": "<|endoftext|>"}, "cls_token": "a"}')
    (folder / "chat_template.json").write_text('{"chat_template": [{"name": "default", "template": "{{ x }}"}]}')
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}

    def damage(rng: random.Random) -> Mapping[str, bytes]:
        if kind == "shards" and rng.random() < 0.8:
            name = f"model-0000{rng.choice((1, 2))}-of-00002.safetensors"
            return {name: _damaged_safetensors(rng, sound[name])}
        name = rng.choice((*_JSON_NAMES[kind], *(("chat_template.json",) if kind == "tokenizer" else ())))
        return {name: damaged_json(rng, sound[name])}

    return folder, damage


def _damaged_safetensors(rng: random.Random, data: bytes) -> bytes:
    header_end = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return damaged_bytes(rng, data, header_end)
    header = damaged_json(rng, data[8:header_end])
    length = len(header) + (rng.choice((-1, 1, 8, 1 << 20, 1 << 60)) if rng.random() < 0.1 else 0)
    return (length % (1 << 64)).to_bytes(8, "little") + header + data[header_end:]


def _families(kind: str, folder: Path) -> tuple[Path, Damage]:
    """The config of a Gemma 3 over its weights or, in half the cases, one of another family over these."""
    del kind
    sizes = {"num_layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 1, "intermediate_size": 32}
    make_tiny_llama(folder, **sizes, config_overrides=TINY_FAMILIES["gemma3"])
    longrope = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    changes = {
        **{name: dict(config) for name, config in TINY_FAMILIES.items()},
        "phi3": {**TINY_FAMILIES["phi3"], "partial_rotary_factor": 0.5, "rope_scaling": longrope},
        "other": {"architectures": ["SomeForCausalLM"], "model_type": "some", "multi_query": True},
    }
    others = [
        (make_tiny_llama(_base_of(folder) / name, **sizes, config_overrides=change) / "config.json").read_bytes()
        for name, change in changes.items()
    ]
    own = (folder / "config.json").read_bytes()

    def damage(rng: random.Random) -> Mapping[str, bytes]:
        return {"config.json": damaged_json(rng, own if rng.random() < 0.5 else rng.choice(others))}

    return folder, damage


def _gguf(kind: str, folder: Path) -> tuple[Path, Damage]:
    own = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-1.0 * number for number in range(320)]}
    metadata = own if kind == "sentencepiece" else {}
    path = make_tiny_gguf(folder / "model.gguf", quantisation="Q4_1", tie=True, metadata=metadata)
    data = path.read_bytes()
    parts = GgufParts(data)

    def damage(rng: random.Random) -> Mapping[str, bytes]:
        if rng.random() < 0.4:
            return {path.name: damaged_bytes(rng, data, parts.header_size)}
        return {path.name: parts.damaged(rng)}

    return path, damage


def _adapter(kind: str, folder: Path) -> tuple[Path, Damage]:
    del kind
    base = make_tiny_llama(_base_of(folder), num_layers=1, hidden_size=16, heads=2, kv_heads=1, intermediate_size=32)
    config = open_checkpoint(base).config
    modules = dict.fromkeys([*layer_modules(config, "q_proj", "down_proj"), EMBEDDING], 4)
    tensors = {**adapter_tensors(config, modules), f"{PREFIX}model.norm.weight": np.ones(16, np.float32)}
    options = {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "modules_to_save": ["model.norm"]}
    patterns = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"down_proj": 2}}
    write_adapter(folder, tensors, **options, **patterns)
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}

    def damage(rng: random.Random) -> Mapping[str, bytes]:
        if rng.random() < 0.5:
            return {"adapter_model.safetensors": _damaged_safetensors(rng, sound["adapter_model.safetensors"])}
        return {"adapter_config.json": damaged_json(rng, sound["adapter_config.json"])}

    return folder, damage


def _ranks(kind: str, folder: Path) -> tuple[Path, Damage]:
    """A checkpoint of two ranks, in our format or in TensorRT-LLM's."""
    base = make_tiny_llama(_base_of(folder), num_layers=1, hidden_size=16, heads=2, kv_heads=1, intermediate_size=32)
    if kind == "presliced":
        folder.rmdir()
        options = {"progress": lambda _done, _total: None, "cancelled": lambda: False}
        slice_checkpoint(open_checkpoint(base), folder, Split(2), **options)
    else:
        make_tiny_trtllm(folder, json.loads((base / "config.json").read_text()), tp=2)
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}
    ranks = sorted(name for name in sound if name.endswith(".safetensors"))
    description = "stepwire.json" if kind == "presliced" else "config.json"

    def damage(rng: random.Random) -> Mapping[str, bytes]:
        if rng.random() < 0.4:
            name = rng.choice(ranks)
            return {name: _damaged_safetensors(rng, sound[name])}
        return {description: damaged_json(rng, sound[description])}

    return folder, damage


def _base_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-base")


def _load_adapter(path: Path) -> LoadedAdapter | None:
    """Does all that a check and a load do with an adapter; None when it is refused."""
    base = open_checkpoint(_base_of(path))
    try:
        adapter = open_adapter(path, base.config)
        adapter_bytes(adapter, RankPlace(1, 2))
        loaded = load_adapter(adapter, RankPlace())
        wanted = [WeightSlice(name, info.shape) for name, info in base.tensors.items()]
        weights = load_weights(base, wanted, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)
        merge_adapter(weights, loaded)
    except CheckpointError as error:
        check_refusal(error)
        return None
    expected = load_file(adapter.weights_file)
    for factors, module in ((loaded.factors[name], module) for name, module in adapter.modules.items()):
        for tensor, info in ((factors.a, module.a), (factors.b, module.b)):
            if not torch.equal(tensor.view(torch.uint8), expected[info.name].view(torch.uint8)):
                raise ValueError(f"{info.name} was loaded wrongly")
    return loaded


def _load(path: Path, kind: str) -> Checkpoint | LoadedAdapter | None:
    """Does all that a check and a start do with a checkpoint; None when it is refused."""
    if kind == "adapter":
        return _load_adapter(path)
    try:
        checkpoint = open_checkpoint(path)
        inspect_checkpoint(checkpoint, Wish(2, 1, memory_bytes=1 << 30))
        tokenizer = load_tokenizer(checkpoint).tokenizer
        for text in _TEXTS:
            tokenizer.decode(tokenizer.encode(text).ids)
        wanted = [WeightSlice(name, info.shape) for name, info in checkpoint.tensors.items()]
        if kind in ("config", "families", "tokenizer"):
            wanted = wanted[:2]  # their values do not depend on what was damaged
        loaded = load_weights(checkpoint, wanted, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False)
    except CheckpointError as error:
        check_refusal(error)
        return None
    if kind in _GGUF_KINDS:
        _compare_gguf(checkpoint, loaded)
    elif kind == "shards":
        _compare_safetensors(checkpoint, loaded)
    elif kind in _RANK_KINDS:
        _compare_pieces(checkpoint, loaded)
    return checkpoint


def check_refusal(error: CheckpointError) -> None:
    """Whether an error can be shown, and sent over RPC. Raises ValueError."""
    texts = (error.message, error.remedy, error.tensor or "", error.expected or "", error.found or "")
    size = sum(len(text.encode("utf-8")) for text in texts)
    if error.code not in ("not_found", "invalid", "unsupported") or not error.message or not error.remedy:
        raise ValueError(f"no whole error: {error!r:.500}")
    if size > 8192:
        raise ValueError(f"an error of {size} bytes: {error!r:.500}")


def _compare_safetensors(checkpoint: Checkpoint, loaded: Mapping[str, torch.Tensor]) -> None:
    for file in {info.file for info in checkpoint.tensors.values()}:
        try:
            expected = load_file(file)
        except SafetensorError:  # stricter than we where it does not matter, as in numbers nobody reads
            continue
        for name, tensor in expected.items():
            if not torch.equal(loaded[name].view(torch.int32), tensor.float().view(torch.int32)):
                raise ValueError(f"{name} was loaded wrongly")


def _compare_pieces(checkpoint: Checkpoint, loaded: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in loaded.items():
        expected = torch.from_numpy(read_slowly(checkpoint.tensors[name]).copy())
        if not torch.equal(tensor.view(torch.int32), expected.view(torch.int32)):
            raise ValueError(f"{name} was loaded wrongly")


def _compare_gguf(checkpoint: Checkpoint, loaded: Mapping[str, torch.Tensor]) -> None:
    raw = checkpoint.path.read_bytes()
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        if name not in loaded:
            continue
        info = checkpoint.tensors[name]
        if info.stored_name != gguf_name(name):
            raise ValueError(f"{name} comes from {info.stored_name}")
        stored = gguf.GGMLQuantizationType[info.dtype]
        data = torch.frombuffer(bytearray(raw[info.offset : info.offset + info.num_bytes]), dtype=torch.uint8).numpy()
        expected = torch.from_numpy(gguf.quants.dequantize(data, stored).copy()).view(info.shape)
        if not torch.equal(loaded[name].view(torch.int32), expected.float().view(torch.int32)):
            raise ValueError(f"{name} was loaded wrongly")


_MAKERS = {
    **dict.fromkeys(_GGUF_KINDS, _gguf),
    **dict.fromkeys(_RANK_KINDS, _ranks),
    "adapter": _adapter,
    "families": _families,
}


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MAX_EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:5]), Path(sys.argv[5]))  # type: ignore[misc]
