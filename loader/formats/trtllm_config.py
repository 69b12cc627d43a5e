"""What TensorRT-LLM's config.json says, in Hugging Face's words. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.errors import CheckpointError
from loader.fields import Fields
from loader.hf_config import unsupported_architecture

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_SIZE_BOUNDS = (1, 4096)
_USE_OTHER = "convert the model again without it, or use its Hugging Face form"
# Their field -> Hugging Face's, where the meaning is the same.
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "head_size": "head_dim",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
    "hidden_act": "hidden_act",
    "attn_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "dtype": "torch_dtype",
}
# Field -> the only value with which it changes nothing.
_NEUTRAL: Mapping[str, object] = {
    "position_embedding_type": "rope_gpt_neox",
    "residual_mlp": False,
    "rotary_pct": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
    "use_prompt_tuning": False,
}


@dataclass(frozen=True, slots=True)
class RankMapping:
    """For how many ranks a checkpoint was converted, and along which dimension they hold parts of the embedding."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    embedding_dim: int | None

    @property
    def num_ranks(self) -> int:
        """Ranks, and files, in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def rank_mapping(path: Path, content: Mapping[str, Any]) -> RankMapping:
    """The mapping of a config that was read from `path`. Raises CheckpointError."""
    values = Fields(path, content)
    mapping = Fields(path, content["mapping"])
    tp, pp = mapping.integer("tp_size", _SIZE_BOUNDS, 1), mapping.integer("pp_size", _SIZE_BOUNDS, 1)
    if mapping.integer("cp_size", _SIZE_BOUNDS, 1) > 1:
        raise mapping.error("cp_size", "is above 1", "1", str(content["mapping"]["cp_size"]))
    world = mapping.integer("world_size", _SIZE_BOUNDS, tp * pp)
    if world != tp * pp:
        raise mapping.error("world_size", f"is {world}", f"tp_size {tp} x pp_size {pp}", str(world))
    dim = None
    if values.boolean("use_parallel_embedding", default=False) and tp > 1:
        dim = values.integer("embedding_sharding_dim", (0, 1), 0)
    return RankMapping(tp, pp, dim)


def huggingface_fields(path: Path, content: Mapping[str, Any], *, tie: bool) -> dict[str, Any]:
    """The config as Hugging Face's config.json would say it; `tie` tells that there is no head of its own.

    Raises CheckpointError "unsupported" for quantised weights, experts, and what else we do not compute.
    """
    architecture = content.get("architecture")
    if content.get("qwen_type") in ("qwen2", "qwen3"):
        architecture = f"{str(content['qwen_type']).title()}ForCausalLM"
    if architecture not in _ARCHITECTURES:
        raise unsupported_architecture(path, str(architecture)[:100], _ARCHITECTURES)
    _refuse_quantised(path, content.get("quantization"))
    experts = content.get("moe")
    if isinstance(experts, dict) and experts.get("num_experts"):
        raise _unsupported(path, "moe.num_experts", experts["num_experts"], 0)
    for name, neutral in _NEUTRAL.items():
        if content.get(name) not in (None, neutral):
            raise _unsupported(path, name, content[name], neutral)
    fields = {theirs: content[ours] for ours, theirs in _SAME.items() if content.get(ours) is not None}
    fields["num_key_value_heads"] = content.get("num_key_value_heads") or content.get("num_attention_heads")
    # These families have no window of attention unless it is asked for, and TensorRT-LLM keeps none.
    return {**fields, "architectures": [architecture], "tie_word_embeddings": tie, "sliding_window": None}


def _refuse_quantised(path: Path, quantisation: object) -> None:
    if not isinstance(quantisation, dict):
        return
    for name in ("quant_algo", "kv_cache_quant_algo"):
        method = quantisation.get(name)
        if method is not None:
            raise CheckpointError(
                "unsupported",
                f"{path}: {name} {str(method)[:100]!r} of TensorRT-LLM is not supported",
                "convert the model again without quantisation, or use its Hugging Face form",
                file=path,
                expected="no quantisation",
                found=str(method)[:100],
            )


def _unsupported(path: Path, name: str, found: object, neutral: object) -> CheckpointError:
    text = str(found)[:100]
    return CheckpointError(
        "unsupported",
        f"{path}: {name} {text} is not supported, only {neutral}",
        _USE_OTHER,
        file=path,
        expected=str(neutral),
        found=text,
    )
