"""The models that peers are compared on, the same weights for all: a safetensors folder and a GGUF file, in bfloat16.

They are made once, under `${STEPWIRE_CACHE:-~/.cache/stepwire}/compare`, from the demo model's GGUF (dequantised and
rounded to bfloat16) and from random numbers in the shape of a Llama of about 1.1 billion parameters; by
`python -m benchmarks.peers.models`, as `make peers` does, so that no comparison waits for it.
"""

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.ready import demo_model_path
from loader.checkpoint import open_checkpoint
from loader.config import ModelConfig, RopeConfig
from loader.layout import expected_tensors
from loader.tensors import WeightSlice
from loader.tokenizer import load_tokenizer
from loader.weights import load_weights

# TinyLlama's shape.
BIG = ModelConfig(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=32000,
    hidden_size=2048,
    num_layers=22,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=5632,
    max_position_count=2048,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0, None, {}),
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Model:
    """One model as files: a folder with config.json, tokenizer.json and model.safetensors, and a GGUF file."""

    config: ModelConfig
    folder: Path
    gguf: Path

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a decode step must read: all but the rows of an embedding that is no head as well."""
        shapes = expected_tensors(self.config)
        if not self.config.tie_word_embeddings:
            del shapes["model.embed_tokens.weight"]
        return sum(2 * int(np.prod(shape)) for shape in shapes.values())


def demo_model(source: Path) -> Model:
    """The demo model in bfloat16, made from its quantised GGUF `source` unless it is there."""
    checkpoint = open_checkpoint(source)
    config = dataclasses.replace(checkpoint.config, dtype="bfloat16")

    def tensors() -> dict[str, torch.Tensor]:
        wanted = [WeightSlice(name, shape) for name, shape in expected_tensors(config).items()]
        return load_weights(
            checkpoint, wanted, dtype=torch.bfloat16, progress=lambda _bytes: None, cancelled=lambda: False
        )

    def tokenizer() -> Tokenizer:
        return load_tokenizer(checkpoint).tokenizer

    return _made("demo", config, tensors, tokenizer)


def big_model() -> Model:
    """The random one, made unless it is there."""
    return _made("big", BIG, lambda: random_tensors(BIG, seed=0), lambda: byte_tokenizer(BIG.vocab_size))


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights under their Hugging Face names, in bfloat16: norms are 1, others normal, scaled by their width."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, shape[1] ** -0.5, generator=generator)
    return tensors


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of the 256 bytes, filled up to `vocab_size` with tokens that no text has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<unused-{number}>" for number in range(vocab_size - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Llama."""
    return {
        "architectures": [config.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_count,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
    }


def write_gguf(path: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """A Llama as llama.cpp has it: matrices in bfloat16, norms in float32, no vocabulary but its size.

    llama.cpp rotates neighbouring pairs of rows where Hugging Face rotates halves of a head, so the rows of queries
    and keys are stored in another order.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_count)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in tensors.items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        stored = tensor if heads is None else pairwise_rows(tensor, heads)
        if stored.dim() == 1:
            writer.add_tensor(gguf_name(name), stored.float().numpy())
        else:
            words = stored.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(gguf_name(name), words, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pairwise_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [heads * size, columns] with the two halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part.removesuffix('.weight')]}.weight"


def _made(
    name: str,
    config: ModelConfig,
    tensors: Callable[[], dict[str, torch.Tensor]],
    tokenizer: Callable[[], Tokenizer],
) -> Model:
    """The model called `name`, written whole or not at all when it is not there."""
    cache = Path(os.environ.get("STEPWIRE_CACHE") or Path.home() / ".cache" / "stepwire")
    home = cache / "compare" / name
    model = Model(config, home / "bf16", home / "bf16.gguf")
    if home.is_dir():
        return model
    print(f"writing the {name} model to {home}", file=sys.stderr)
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{name}-"))
    try:
        folder = scratch / "bf16"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf_config(config), indent=1))
        tokenizer().save(str(folder / "tokenizer.json"))
        save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        # Read back, so that both files hold the same bits.
        write_gguf(scratch / "bf16.gguf", config, load_file(folder / "model.safetensors"))
        scratch.rename(home)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return model


if __name__ == "__main__":
    demo_model(demo_model_path())
    big_model()
