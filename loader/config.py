"""What a checkpoint says of its model, in one form for every format. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from loader.quantised.config import Quantisation

Norms = Literal["before", "after", "around"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `scaling_type` is None, "linear", "dynamic", "yarn", "llama3", "longrope", …;
    `parameters` holds that type's own numbers, and lists of them, as the checkpoint names them."""

    theta: float
    scaling_type: str | None
    parameters: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixtures of experts, in the layers whose numbers are in `layers`.

    Each token goes through `num_chosen` of `num_experts` gated MLPs of `intermediate_size`. Their weights are the
    router's probabilities, brought to a sum of 1 where `normalised`.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalised: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model of none of our families, to be run by transformers' own definition of it.

    `content` is that of config.json. `tensors` are the shapes of those that its checkpoint holds, by name: which of
    them the model needs only transformers can tell.
    """

    content: Mapping[str, object]
    tensors: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder.

    `architecture` is as the checkpoint names it in the Hugging Face way ("LlamaForCausalLM");
    `family` is our short name for it ("llama"). `qkv_bias` and `output_bias` tell which products of
    attention have a bias, `qk_norm` whether queries and keys are normalised head by head. In the layers
    whose numbers are in `sliding_layers` a token sees itself and the `sliding_window` - 1 before it.
    `dtype` is what the weights are stored in, or "bfloat16" for a quantised GGUF. `eos_token_ids` come
    from generation_config.json where there is one.

    `norms` tells where attention and MLP are normalised: their inputs, their outputs, or both. `norm_offset` is added
    to the weights of all norms. With `qk_norm_whole` queries and keys are normalised over all heads together.
    `embedding_scale` multiplies embeddings, after rounding to the model's type. `attention_scale` multiplies scores;
    None stands for head_dim ** -0.5. A softcap c maps scores, or logits, x to c * tanh(x / c). `local_rope` takes the
    place of `rope` in the sliding layers. Of each head the first `rotary_dim` values are rotated; None for all.
    After the last layer a checkpoint may store `num_unused_layers` more, which only speculation would use.
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_count: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    hidden_act: str
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    norms: Norms = "before"
    norm_offset: float = 0.0
    qk_norm_whole: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    local_rope: RopeConfig | None = None
    rotary_dim: int | None = None
    experts: ExpertsConfig | None = None
    other: OtherModel | None = None
    num_unused_layers: int = 0
    quantisation: Quantisation | None = None
