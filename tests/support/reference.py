"""What transformers makes of a checkpoint that the loader has read."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loader.checkpoint import open_checkpoint
from loader.config import ModelConfig
from loader.tensors import WeightSlice
from loader.weights import load_weights

# Threads of torch wait for each other; on cores that others use too, one is faster than two.
_NUM_THREADS = 1


class Reference:
    """transformers' Llama in float32, with the weights of a checkpoint."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        wanted = [WeightSlice(name, info.shape) for name, info in checkpoint.tensors.items()]
        tensors = load_weights(
            checkpoint, wanted, dtype=torch.float32, progress=lambda _: None, cancelled=lambda: False
        )
        if checkpoint.config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        self._model = LlamaForCausalLM(_config(checkpoint.config)).eval()
        self._model.load_state_dict(tensors)

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """The logits [len(output), vocab_size] from which each token of `output` was to be drawn.

        One pass over prompt and output. An output is the greedy one exactly when each of its tokens
        is the most likely after the tokens before it, so this checks as much as generating again.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(_NUM_THREADS)
        try:
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *output[:-1]]])
                result: torch.Tensor = self._model(ids, logits_to_keep=len(output), use_cache=False).logits[0]
                return result
        finally:
            torch.set_num_threads(threads)


def _config(config: ModelConfig) -> LlamaConfig:
    if config.rope.scaling_type is not None:
        raise ValueError("the reference knows plain rotary embeddings only")
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_count,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        hidden_act=config.hidden_act,
    )
