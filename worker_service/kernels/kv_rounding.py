"""Keys and values in eight bits: integers or floats, with a scale for each head of each position."""

from collections.abc import Mapping

import torch

KV_DTYPES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What caches store besides the model's own type, by the names of the setting `kv_cache_dtype`."""

LARGEST: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def round_heads(x: torch.Tensor, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] as codes [..., head_dim] of type `stored` and scales, float32 [...], that multiply them."""
    values = x.float()
    scales = values.abs().amax(-1) / LARGEST[stored]
    codes = values / torch.where(scales > 0, scales, torch.ones_like(scales))[..., None]
    return (codes.round() if stored == torch.int8 else codes).to(stored), scales


def restore_heads(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `round_heads` gave, in `dtype`."""
    return (codes.float() * scales[..., None]).to(dtype)
