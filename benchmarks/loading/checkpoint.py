"""A checkpoint of the shape of a Llama of 8 billion, with as many layers as are asked for, and its place in a cache."""

import ctypes
import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

CACHE = Path("~/.cache/stepwire/bench").expanduser()
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 32000
_SHARD_BYTES = 1 << 30
_SPARE_BYTES = 2 << 30


def make_checkpoint(gib: float) -> Path:
    """Writes at least `gib` GiB in shards of bf16, unless an earlier run left them. Raises OSError without the room."""
    num_layers = 1
    while (total := sum(2 * prod(shape) for _, shape in _tensors(num_layers))) < gib * (1 << 30):
        num_layers += 1
    folder = CACHE / f"load-{num_layers}-layers"
    if (folder / "config.json").exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(CACHE).free
    if free < total + _SPARE_BYTES:
        raise OSError(f"{CACHE} has {free} bytes free, and {total + _SPARE_BYTES} are needed")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _write_shards(folder, num_layers)
    (folder / "config.json").write_text(json.dumps(_config(num_layers)))  # last: then all of it is there
    return folder


def shards_of(folder: Path) -> list[Path]:
    """The files that hold the tensors."""
    return sorted(folder.glob("*.safetensors"))


def drop_cache(folder: Path) -> None:
    """Empties the page cache of the shards. Raises RuntimeError where mincore still finds pages of them."""
    for path in shards_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if resident_share(folder) > 0.001:
        raise RuntimeError("the page cache keeps the checkpoint")


def fill_cache(folder: Path) -> None:
    """Reads the shards, so that the page cache holds them. Raises RuntimeError where it does not."""
    buffer = bytearray(16 << 20)
    for path in shards_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    if resident_share(folder) < 0.999:
        raise RuntimeError("the page cache cannot hold the checkpoint")


def resident_share(folder: Path) -> float:
    """Which share of the shards' pages is in the page cache, by mincore."""
    resident = total = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in shards_of(folder):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            view = np.frombuffer(mapping, np.uint8)
            pages = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
            address, found = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
            failed = libc.mincore(address, ctypes.c_size_t(len(view)), found)
            del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        resident, total = resident + int((pages & 1).sum()), total + len(pages)
    return resident / total


def _tensors(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{prefix}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        for name, rows in (("k", kv), ("o", HIDDEN), ("q", HIDDEN), ("v", kv)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def _write_shards(folder: Path, num_layers: int) -> None:
    shards: list[dict[str, Any]] = [{}]
    sizes = [0]
    for name, shape in _tensors(num_layers):
        num_bytes = 2 * prod(shape)
        if sizes[-1] + num_bytes > _SHARD_BYTES and shards[-1]:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [sizes[-1], sizes[-1] + num_bytes]}
        sizes[-1] += num_bytes
    weight_map = {}
    block = np.random.default_rng(0).bytes((16 << 20) + 4099)
    for number, (header, size) in enumerate(zip(shards, sizes, strict=True), start=1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map.update(dict.fromkeys(header, path.name))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for start in range(0, size, 16 << 20):
                skip = start % 4099  # so that no two blocks are alike
                file.write(block[skip : skip + min(16 << 20, size - start)])
            os.fsync(file.fileno())
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _config(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
