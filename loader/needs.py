"""What a rank reads, holds and takes of memory to load, told from headers. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from loader.byte_runs import BLOCKS, rank_byte_runs
from loader.checkpoint import Checkpoint
from loader.config import ModelConfig
from loader.layout import Embedding, Linear, num_held_kv_heads, parameters, weight_slices
from loader.quantised.roundings import Rounding, rounded_bytes, rounding_of, weight_shape
from loader.quantised.schemes import BlockScheme
from loader.reading.tuning import READ_BUFFER_BYTES
from loader.shares import RankPlace, stage_layers
from loader.tensors import WeightSlice

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
KV_SCALE_BYTES = 4
"""Of the float that multiplies the values of a head at a position, where these are of eight bits."""
# While quantised weights are laid out anew, each of their values takes so many bytes: as a byte of its own, joined, in
# turn with another weight's, and where it comes to lie.
_BYTES_PLACED = 4
# Products of the same input are joined into one.
_JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What one rank holds and reads, in bytes.

    `read_bytes` are the fewest bytes of the files that hold its part, `weight_bytes` those of the weights as loaded,
    `adapter_bytes` those of its part of the adapters. `resident_bytes` is what stays of all of them in memory: a CPU
    worker holds an embedding that is also the head twice, the second time packed; others may do with less.
    `host_peak_bytes` is the most that loading takes of the host's memory; what the process itself occupies, and what
    its allocator keeps of small tensors that are freed, comes on top. `kv_bytes_per_token` counts this rank's layers
    and key-value heads.
    """

    tensor_rank: int
    pipeline_rank: int
    num_layers: int
    num_kv_heads: int
    read_bytes: int
    weight_bytes: int
    adapter_bytes: int
    resident_bytes: int
    host_peak_bytes: int
    kv_bytes_per_token: int


def rank_needs(
    checkpoint: Checkpoint,
    place: RankPlace,
    dtype: str,
    adapter_bytes: int = 0,
    rounding: Rounding | None = None,
    kv_cache_dtype: str = "auto",
) -> RankNeeds:
    """What the rank at `place` needs to hold its part in `dtype`, beside adapters of `adapter_bytes`, with `rounding`
    of what is not quantised, and keys and values as `kv_cache_dtype`.

    Raises CheckpointError for a tensor of its part that is missing or has another shape, ValueError for a size that
    cannot split the model.
    """
    config, value_bytes = checkpoint.config, DTYPE_BYTES[dtype]
    wanted = weight_slices(config, place)
    read_bytes = sum(run.num_bytes for run in rank_byte_runs(checkpoint.path, checkpoint.tensors, wanted))
    sizes = _held_bytes(config, place, value_bytes, rounding)
    weight_bytes = sum(sizes.values())
    # A head that shares the embedding's weight is packed into a copy, for looking up rows needs the weight as it was;
    # one that is kept quantised, or is rounded, serves both.
    is_kept = config.quantisation is not None and "model.embed_tokens" in config.quantisation.schemes
    is_copied = place.is_last_stage and config.tie_word_embeddings and not is_kept and rounding in (None, "fp8")
    copied = sizes["model.embed_tokens.weight"] if is_copied else 0
    resident_bytes = weight_bytes + copied + adapter_bytes
    layers = stage_layers(config.num_layers, place.pipeline_rank, place.pipeline_parallel_size)
    kv_heads = num_held_kv_heads(config, place)
    return RankNeeds(
        tensor_rank=place.tensor_rank,
        pipeline_rank=place.pipeline_rank,
        num_layers=len(layers),
        num_kv_heads=kv_heads,
        read_bytes=read_bytes,
        weight_bytes=weight_bytes,
        adapter_bytes=adapter_bytes,
        resident_bytes=resident_bytes,
        host_peak_bytes=resident_bytes + _loading_bytes(checkpoint, place, sizes, value_bytes) + READ_BUFFER_BYTES,
        kv_bytes_per_token=2 * len(layers) * kv_heads * _kv_head_bytes(config.head_dim, value_bytes, kv_cache_dtype),
    )


def _kv_head_bytes(head_dim: int, value_bytes: int, kv_cache_dtype: str) -> int:
    return head_dim * value_bytes if kv_cache_dtype == "auto" else head_dim + KV_SCALE_BYTES


def num_parameters(config: ModelConfig) -> int:
    """Values of the model's weights, however they are stored; one that is shared counts once."""
    total = 0
    for part in parameters(config, RankPlace()):
        if isinstance(part, Linear):
            total += part.outputs.size * (part.inputs.size + part.bias)
        else:
            total += part.rows.size * part.columns if isinstance(part, Embedding) else part.size
    return total


def _held_bytes(config: ModelConfig, place: RankPlace, value_bytes: int, rounding: Rounding | None) -> dict[str, int]:
    """Bytes of a rank's weights and biases once loaded, by name."""
    sizes: dict[str, int] = {}
    for part in parameters(config, place):
        wanted = part.slices()
        rounded_to = rounding_of(part, rounding, is_tied=config.tie_word_embeddings)
        if isinstance(part, Linear | Embedding) and part.scheme is not None:
            num_bytes = part.scheme.resident_bytes(part.outputs, part.inputs)
            sizes[f"{part.name}.weight"] = num_bytes + _widened(config, part)
            wanted = part.bias_slices() if isinstance(part, Linear) else iter(())
        elif rounded_to is not None and isinstance(part, Linear | Embedding):
            sizes[f"{part.name}.weight"] = rounded_bytes(weight_shape(part), rounded_to)
            wanted = part.bias_slices() if isinstance(part, Linear) else iter(())
        sizes.update((want.name, prod(want.part_shape) * value_bytes) for want in wanted)
    return sizes


def _widened(config: ModelConfig, part: Linear | Embedding) -> int:
    """What the compiled kernels make the integers of a GGUF's weight take more because another that is computed with it
    has wider ones."""
    parent, _, name = part.name.rpartition(".")
    joined = [other for other, product in _JOINED.items() if name in _JOINED and product == _JOINED[name]]
    if not isinstance(part.scheme, BlockScheme) or config.quantisation is None:
        return 0
    schemes = [config.quantisation.schemes.get(f"{parent}.{other}") for other in joined]
    bits = max((scheme.form.bits for scheme in schemes if isinstance(scheme, BlockScheme)), default=0)
    return len(part.outputs) * len(part.inputs) * max(0, bits - part.scheme.form.bits) // 8


def _loading_bytes(checkpoint: Checkpoint, place: RankPlace, sizes: Mapping[str, int], value_bytes: int) -> int:
    """What loading takes beside what is held at its end, and beside the reader's buffers.

    Quantised weights wait as they are stored until all parts of them are read, and one at a time is packed, from what
    was read of it. While one is rounded, others are read ahead.
    """
    read, stored, held, ahead = [0], 0, 0, 0
    placed = dict(sizes)
    for part in parameters(checkpoint.config, place):
        if not isinstance(part, Linear | Embedding):
            continue
        name, (rows, columns) = f"{part.name}.weight", weight_shape(part)
        num_bytes, whole = sizes[name], rows * columns * value_bytes
        if part.scheme is not None:
            parts = list(part.scheme.parts(part.name, part.outputs, part.inputs))
            num_stored = sum(_stored_bytes(checkpoint, want) for want in parts)
            stored, held = stored + num_stored, held + num_bytes
            read.append(num_stored + num_bytes)
        elif num_bytes != whole:
            read.append(whole)
            ahead = READ_BUFFER_BYTES
        if num_bytes != whole:
            placed[name] = _BYTES_PLACED * rows * columns
    # What is read ahead is as much again as the largest.
    beside = max(read) + max(0, stored - held) + (max(read) + ahead if ahead else 0)
    return max(_placing_bytes(placed.items()), beside)


def _stored_bytes(checkpoint: Checkpoint, want: WeightSlice) -> int:
    values, num_bytes = BLOCKS[checkpoint.tensors[want.name].dtype]
    return prod(want.part_shape) // values * num_bytes


def _placing_bytes(sizes: Iterable[tuple[str, int]]) -> int:
    """What joining the products of one input, or packing the result, takes beside the weights themselves."""
    joined: dict[str, int] = {}
    for tensor, num_bytes in sizes:
        parent, _, name = tensor.rpartition(".")[0].rpartition(".")
        key = f"{parent}.{_JOINED.get(name, name)}"
        if name != "embed_tokens":
            joined[key] = joined.get(key, 0) + num_bytes
    return max(joined.values(), default=0)
