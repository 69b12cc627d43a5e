"""Tensors that a family stores fused or under names of its own, as the rest of the loader knows them.

Done once, when a checkpoint is opened: everything after that sees one tensor for each product. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from loader.completeness import wrong_shape
from loader.config import ModelConfig
from loader.families import FAMILIES
from loader.tensors import TensorInfo, rows_of

_LAYER = re.compile(r"model\.layers\.\d{1,5}\.")


def logical_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The stored tensors by the names of `loader.layout`, what is fused cut at the rows of its parts.

    Raises CheckpointError for a fused tensor whose rows are not those of its parts.
    """
    family = FAMILIES.get(config.architecture)
    if family is None or not (family.fused or (family.experts is not None and family.experts.stored_names)):
        return dict(tensors)
    renamed = dict(family.experts.stored_names) if family.experts is not None else {}
    result: dict[str, TensorInfo] = {}
    for name, stored in tensors.items():
        if _LAYER.match(name) is None:
            result[name] = stored
        elif renamed:
            logical = ".".join(renamed.get(part, part) for part in name.split("."))
            result[logical] = replace(stored, name=logical)
        else:
            result.update((part.name, part) for part in split_fused(config, stored))
    return result


def split_fused(config: ModelConfig, stored: TensorInfo) -> Iterator[TensorInfo]:
    """The parts of a tensor named as Phi-3 names those that are fused, in order; any other as it is.

    Raises CheckpointError for one whose rows are not those of its parts.
    """
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        "qkv_proj": (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)),
        "gate_up_proj": (("gate_proj", inner), ("up_proj", inner)),
    }
    outer, _, rest = stored.name.rpartition(".")
    outer, _, module = outer.rpartition(".")
    parts = fused.get(module)
    if parts is None:
        yield stored
        return
    num_rows = sum(rows for _, rows in parts)
    if stored.shape[:1] != (num_rows,):
        raise wrong_shape(stored, (num_rows, config.hidden_size)[: max(1, len(stored.shape))])
    start = 0
    for name, rows in parts:
        yield rows_of(stored, f"{outer}.{name}.{rest}", start, start + rows)
        start += rows
