"""How long `stepwire check` takes on a checkpoint of 400 GB in 191 shards, and how much of it is read.

The shards are sparse files with real headers: what lies behind the headers is a hole. Bytes read are the kernel's own
count for this process (/proc/self/io), held against the size of headers, index and configs.
"""

import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, report
from loader.checkpoint import open_checkpoint
from loader.inspection import Wish, inspect_checkpoint

SHARDS, ROUNDS = 191, 7
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 62, 16384, 53248, 128, 8, 128256
OPTIONS = ("--tp", "8", "--pp", "2", "--memory", "80GiB", "--max-model-len", "8192")


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Llama of 400 GB in bf16, in the order of its shards."""
    kv = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, HIDDEN)
        yield f"{prefix}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_checkpoint(folder: Path) -> int:
    """Writes the sparse checkpoint and answers the bytes of its headers, index and configs."""
    tensors = list(tensor_shapes())
    shards = [tensors[len(tensors) * i // SHARDS : len(tensors) * (i + 1) // SHARDS] for i in range(SHARDS)]
    weight_map, total, header_bytes = {}, 0, 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        header, offset = {}, 0
        for tensor, shape in shard:
            end = offset + 2 * prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            weight_map[tensor], offset = name, end
        text = json.dumps(header).encode()
        head = struct.pack("<Q", len(text)) + text
        with (folder / name).open("wb") as file:
            file.write(head)
            file.truncate(len(head) + offset)
        total, header_bytes = total + offset, header_bytes + len(head)
    small = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": weight_map},
        "config.json": model_config(),
        "tokenizer.json": {"model": {}},
        "tokenizer_config.json": {"chat_template": "{{ messages }}"},
    }
    for name, content in small.items():
        (folder / name).write_text(json.dumps(content))
    return header_bytes + sum((folder / name).stat().st_size for name in small)


def model_config() -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def bytes_read() -> int:
    """Bytes that this process has read so far, from caches too."""
    return int(Path("/proc/self/io").read_text().split()[1])


def bytes_read_by_a_check(folder: Path) -> int:
    """What opening and inspecting reads."""
    wish = Wish(8, 2, memory_bytes=80 << 30, max_model_len=8192)
    inspect_checkpoint(open_checkpoint(folder), wish)  # modules that are imported late are not the checkpoint's
    own = -bytes_read() + bytes_read()
    before = bytes_read()
    inspect_checkpoint(open_checkpoint(folder), wish)
    return bytes_read() - before - own


def run_check(folder: Path) -> tuple[float, dict[str, Any]]:
    """Seconds of a whole `stepwire check` process, and what it says."""
    command = [sys.executable, "-m", "stepwire.cli.main", "check", str(folder), *OPTIONS, "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise RuntimeError(f"check exited with {done.returncode}: {done.stdout[:500]!r} {done.stderr[:500]!r}")
    return seconds, json.loads(done.stdout)


def main() -> int:
    """Measures and reports."""
    with tempfile.TemporaryDirectory(prefix="stepwire-check-") as name:
        folder = Path(name)
        metadata_bytes = write_checkpoint(folder)
        run_check(folder)
        measured = [run_check(folder) for _ in range(ROUNDS)]
        read_bytes = bytes_read_by_a_check(folder)
        on_disk = sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))
    found = measured[-1][1]
    return report(
        {
            "check_s": Bar(round(statistics.median(seconds for seconds, _ in measured), 3), 1.0, "at most"),
            # The first 256 bytes of a shard, which tell what kind of file it is, are read twice.
            "extra_bytes_a_shard": Bar(round((read_bytes - metadata_bytes) / SHARDS), 512, "at most"),
        },
        {
            "check_s_max": round(max(seconds for seconds, _ in measured), 3),
            "checkpoint_bytes": found["stored_bytes"],
            "shards": found["files"],
            "tensors": found["tensors"],
            "header_bytes": metadata_bytes,
            "read_bytes": read_bytes,
            "sparse_bytes_on_disk": on_disk,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
