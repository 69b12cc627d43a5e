"""Shapes of models: of a checkpoint, read from its headers, and of models that are known by name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.config import ModelConfig
from stepwire.simulation.cost import ModelShape

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def shape_of_config(config: ModelConfig, dtype: str = "auto") -> ModelShape:
    """The shape of a decoder whose weights and KV cache are held in `dtype`, "auto" for the checkpoint's own.

    Of a mixture of experts those parameters count that a token goes through; a step is taken to read all weights.
    Raises ValueError for a dtype that is not known.
    """
    chosen = config.dtype if dtype == "auto" else dtype
    if chosen not in _DTYPE_BYTES:
        raise ValueError(f"dtype {chosen!r} is not one of {', '.join(_DTYPE_BYTES)}")
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * query + 2 * kv)
    mlp = 3 * config.hidden_size * config.intermediate_size
    norms = 2 * config.hidden_size
    layers = held = config.num_layers * (attention + mlp + norms)
    if config.experts is not None:
        experts, mixed = config.experts, len(config.experts.layers)
        expert, router = 3 * config.hidden_size * experts.intermediate_size, config.hidden_size * experts.num_experts
        layers += mixed * (experts.num_chosen * expert + router - mlp)
        held += mixed * (experts.num_experts * expert + router - mlp)
    head = config.hidden_size * config.vocab_size
    size = _DTYPE_BYTES[chosen]
    return ModelShape(
        name=config.family,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        layer_parameters=layers,
        head_parameters=head,
        weight_bytes=(held + head) * size,
        kv_bytes_per_token=2 * config.num_layers * kv * size,
    )


def shape_of_checkpoint(checkpoint: Checkpoint, dtype: str = "auto") -> ModelShape:
    """The shape of an opened checkpoint."""
    return replace(shape_of_config(checkpoint.config, dtype), name=checkpoint.path.stem)


def find_shape(model: str, dtype: str = "auto") -> ModelShape:
    """The shape of a model by its name in SHAPES, or of a checkpoint by its path. Raises CheckpointError.

    Raises ValueError for a name that is neither, and for an unknown dtype.
    """
    known = SHAPES.get(model.lower())
    if known is not None:
        return known
    path = Path(model)
    if len(path.parts) == 1 and not path.exists():
        raise ValueError(f"{model!r} is neither a checkpoint here nor one of {', '.join(SHAPES)}")
    return shape_of_checkpoint(open_checkpoint(path), dtype)


def _llama(name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> ModelShape:
    head_dim = hidden // heads
    parameters = layers * (hidden * (2 * hidden + 2 * kv_heads * head_dim) + 3 * hidden * mlp + 2 * hidden)
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        vocab_size=vocab,
        layer_parameters=parameters,
        head_parameters=hidden * vocab,
        weight_bytes=2 * (parameters + hidden * vocab),
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * 2,
    )


SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("smollm2-135m", layers=30, hidden=576, heads=9, kv_heads=3, mlp=1536, vocab=49152),
        _llama("llama-3.2-1b", layers=16, hidden=2048, heads=32, kv_heads=8, mlp=8192, vocab=128256),
        _llama("llama-3.1-8b", layers=32, hidden=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256),
        _llama("llama-3.1-70b", layers=80, hidden=8192, heads=64, kv_heads=8, mlp=28672, vocab=128256),
    )
}
"""Decoders in bf16, by the names that people use for them."""
