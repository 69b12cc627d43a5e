"""What a checkpoint needs, and whether it will fit, told from its headers alone. Imports no torch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from loader.byte_runs import rank_byte_runs
from loader.chat_template import choose_template, folder_templates, gguf_templates
from loader.checkpoint import Checkpoint
from loader.config import ModelConfig
from loader.errors import CheckpointError, unreadable
from loader.files import foreign_file_error, read_head, read_json_object
from loader.hf_config import DTYPES
from loader.layout import expected_tensors, tensor_parallel_problem, tensor_parallel_sizes, weight_slices
from loader.shares import RankPlace, grouped_share, stage_layers
from loader.tensors import WeightSlice

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The reader's few chunks in flight, each of a few MiB before and after it is decoded.
READ_BUFFER_BYTES = 64 << 20
# Products of the same input are joined into one.
_JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True, slots=True)
class Wish:
    """How the checkpoint is to be served. Raises ValueError for a number below 1 and for an unknown dtype.

    `dtype` is "auto" for the checkpoint's own. `memory_bytes` is what each rank may use for weights and KV blocks;
    None leaves open what fits.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    memory_bytes: int | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "memory_bytes", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, and must be at least 1")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the checkpoint cannot be served as wished: a code for programs, what is wrong, and what to do."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What one rank holds and reads, in bytes.

    `read_bytes` are the fewest bytes of the files that hold its part, `weight_bytes` those of the weights as loaded.
    `resident_bytes` is what stays in memory: a CPU worker holds an embedding that is also the head twice, the second
    time packed; others may do with less. `host_peak_bytes` is the most that loading takes of the host's memory; what
    the process itself occupies, and what its allocator keeps of small tensors that are freed, comes on top.
    `kv_bytes_per_token` counts this rank's layers and key-value heads.
    """

    tensor_rank: int
    pipeline_rank: int
    num_layers: int
    num_kv_heads: int
    read_bytes: int
    weight_bytes: int
    resident_bytes: int
    host_peak_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits beside the weights on the rank with least room; activations, which a worker measures, come on top."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a checkpoint before any weight is read.

    `stored_dtypes` maps a storage type to the bytes stored in it. `ranks` is empty where the model cannot be split
    as wished, and `fit` is None then, and where no memory was given. `max_model_len` is the one wished, or the
    longest that the model was made for.
    """

    wish: Wish
    dtype: str
    num_files: int
    num_tensors: int
    num_parameters: int
    stored_dtypes: Mapping[str, int]
    has_tokenizer: bool
    has_chat_template: bool
    tensor_parallel_sizes: tuple[int, ...]
    max_pipeline_parallel_size: int
    max_model_len: int
    ranks: tuple[RankNeeds, ...]
    fit: Fit | None
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]

    @property
    def is_usable(self) -> bool:
        """Whether it can be served as wished, as far as headers tell."""
        return not self.problems


def inspect_checkpoint(checkpoint: Checkpoint, wish: Wish) -> Inspection:
    """Holds an opened checkpoint, whose tensors are complete and well shaped, against a wish.

    Reads of files only the small ones beside the weights; what it finds wrong is among the problems.
    """
    config = checkpoint.config
    dtype = config.dtype if wish.dtype == "auto" else wish.dtype
    text = _text_side(checkpoint)
    unsplit = list(_split_problems(config, wish))
    ranks = () if unsplit else tuple(_rank_needs(checkpoint, place, dtype) for place in _places(wish))
    fit = None
    if ranks and wish.memory_bytes is not None:
        fit = _fit(config, ranks, wish.memory_bytes, wish.block_size)
    problems = [*text.problems, *unsplit, *_length_problems(config, wish, fit, ranks)]
    return Inspection(
        wish=wish,
        dtype=dtype,
        num_files=len({info.file for info in checkpoint.tensors.values()}),
        num_tensors=len(checkpoint.tensors),
        num_parameters=sum(prod(shape) for shape in expected_tensors(config).values()),
        stored_dtypes=_stored_dtypes(checkpoint),
        has_tokenizer=text.has_tokenizer,
        has_chat_template=text.has_chat_template,
        tensor_parallel_sizes=tensor_parallel_sizes(config),
        max_pipeline_parallel_size=config.num_layers,
        max_model_len=wish.max_model_len or config.max_position_count,
        ranks=ranks,
        fit=fit,
        problems=tuple(problems),
        warnings=tuple(_warnings(config, wish, dtype, text)),
    )


@dataclass(frozen=True, slots=True)
class _TextSide:
    has_tokenizer: bool
    has_chat_template: bool
    problems: tuple[Problem, ...]


def _text_side(checkpoint: Checkpoint) -> _TextSide:
    """Whether tokenizer and template are there. Building the tokenizer would take longer than all the rest."""
    problems = []
    tokenizer = _tokenizer_problem(checkpoint)
    if tokenizer is not None:
        problems.append(tokenizer)
    templates: Mapping[str, str] = {}
    try:
        templates = _templates(checkpoint)
    except CheckpointError as error:
        problems.append(Problem(error.code, error.message, error.remedy))
    return _TextSide(tokenizer is None, choose_template(templates) is not None, tuple(problems))


def _tokenizer_problem(checkpoint: Checkpoint) -> Problem | None:
    path, remedy = checkpoint.path, "download the model's tokenizer too"
    if checkpoint.format == "gguf":
        if "tokenizer.ggml.tokens" in checkpoint.gguf_metadata:
            return None
        return Problem("not_found", f"{path} holds no tokenizer", remedy)
    file = path / "tokenizer.json"
    if not file.is_file():
        return Problem("not_found", f"{path} has no tokenizer.json", remedy)
    try:
        foreign = foreign_file_error(file, read_head(file), "a tokenizer")
        if foreign is not None:
            raise foreign
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - 64))
            is_whole = stream.read().rstrip().endswith(b"}")
    except CheckpointError as error:
        return Problem(error.code, error.message, error.remedy)
    except OSError as error:
        found = unreadable(file, error)
        return Problem(found.code, found.message, found.remedy)
    return None if is_whole else Problem("invalid", f"{file} is cut off or damaged", "download the file again")


def _templates(checkpoint: Checkpoint) -> Mapping[str, str]:
    if checkpoint.format == "gguf":
        return gguf_templates(checkpoint.path, checkpoint.gguf_metadata)
    path = checkpoint.path / "tokenizer_config.json"
    return folder_templates(checkpoint.path, read_json_object(path) if path.exists() else {})


def _split_problems(config: ModelConfig, wish: Wish) -> Iterator[Problem]:
    size, stages = wish.tensor_parallel_size, wish.pipeline_parallel_size
    reason = tensor_parallel_problem(config, size)
    if reason is not None:
        sizes = ", ".join(map(str, tensor_parallel_sizes(config)))
        yield Problem("tensor_parallel", f"tp {size} does not work: {reason}", f"use one of tp {sizes}")
    if stages > config.num_layers:
        message = f"pp {stages} does not work: the model has {config.num_layers} layers"
        yield Problem("pipeline_parallel", message, f"use a pp of 1 to {config.num_layers}")


def _places(wish: Wish) -> Iterator[RankPlace]:
    for stage in range(wish.pipeline_parallel_size):
        for rank in range(wish.tensor_parallel_size):
            yield RankPlace(rank, wish.tensor_parallel_size, stage, wish.pipeline_parallel_size)


def _rank_needs(checkpoint: Checkpoint, place: RankPlace, dtype: str) -> RankNeeds:
    config, value_bytes = checkpoint.config, _DTYPE_BYTES[dtype]
    wanted = weight_slices(config, place)
    sizes = {want.name: prod(want.part_shape) * value_bytes for want in wanted}
    weight_bytes = sum(sizes.values())
    # A head that shares the embedding's weight is packed into a copy; looking up rows needs the weight as it was.
    copied = sizes["model.embed_tokens.weight"] if place.is_last_stage and config.tie_word_embeddings else 0
    layers = stage_layers(config.num_layers, place.pipeline_rank, place.pipeline_parallel_size)
    kv_heads = len(grouped_share(config.num_kv_heads, place.tensor_rank, place.tensor_parallel_size))
    return RankNeeds(
        tensor_rank=place.tensor_rank,
        pipeline_rank=place.pipeline_rank,
        num_layers=len(layers),
        num_kv_heads=kv_heads,
        read_bytes=sum(run.num_bytes for run in rank_byte_runs(checkpoint.path, checkpoint.tensors, wanted)),
        weight_bytes=weight_bytes,
        resident_bytes=weight_bytes + copied,
        host_peak_bytes=weight_bytes + copied + _placing_bytes(wanted, value_bytes) + READ_BUFFER_BYTES,
        kv_bytes_per_token=2 * len(layers) * kv_heads * config.head_dim * value_bytes,
    )


def _placing_bytes(wanted: list[WeightSlice], value_bytes: int) -> int:
    """What joining the products of one input, or packing the result, takes beside the weights themselves."""
    joined: dict[str, int] = {}
    for want in wanted:
        parent, _, name = want.name.removesuffix(".weight").rpartition(".")
        key = f"{parent}.{_JOINED.get(name, name)}"
        if name != "embed_tokens":
            joined[key] = joined.get(key, 0) + prod(want.part_shape) * value_bytes
    return max(joined.values(), default=0)


def _fit(config: ModelConfig, ranks: Sequence[RankNeeds], memory_bytes: int, block_size: int) -> Fit:
    rooms = ((memory_bytes - rank.resident_bytes) // (rank.kv_bytes_per_token * block_size) for rank in ranks)
    num_blocks = max(0, min(rooms))
    return Fit(num_blocks, min(num_blocks * block_size, config.max_position_count))


def _length_problems(config: ModelConfig, wish: Wish, fit: Fit | None, ranks: Sequence[RankNeeds]) -> Iterator[Problem]:
    longest = config.max_position_count
    wanted = wish.max_model_len or longest
    if wanted > longest:
        message = f"max_model_len is {wanted} and the model was made for {longest} tokens"
        yield Problem("max_model_len", message, f"use a max_model_len of at most {longest}")
    if fit is None or wish.memory_bytes is None or fit.max_model_len >= min(wanted, longest):
        return
    weights = max(rank.resident_bytes for rank in ranks)
    if fit.num_blocks == 0:
        message = f"the weights of a rank take {weights} bytes, and beside them {wish.memory_bytes} hold no KV block"
        yield Problem("out_of_memory", message, "give more memory, or use more ranks or a smaller model")
        return
    message = (
        f"one sequence of {min(wanted, longest)} tokens needs {-(-min(wanted, longest) // wish.block_size)} KV blocks, "
        f"and beside the weights {wish.memory_bytes} bytes hold {fit.num_blocks}"
    )
    yield Problem("out_of_memory", message, f"use a max_model_len of at most {fit.max_model_len}, or give more memory")


def _stored_dtypes(checkpoint: Checkpoint) -> Mapping[str, int]:
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.dtype] += info.num_bytes
    return dict(sizes.most_common())


def _warnings(config: ModelConfig, wish: Wish, dtype: str, text: _TextSide) -> Iterator[str]:
    size, stages = wish.tensor_parallel_size, wish.pipeline_parallel_size
    if not text.has_chat_template:
        yield "there is no chat template: prompts can be continued, chats cannot be answered"
    if not config.eos_token_ids:
        yield "no end token is named: a sequence ends by length or stop string only"
    if dtype == "float16" and config.dtype != "float16":
        yield "float16 cannot hold values above 65504: loading fails where the weights have one; bfloat16 holds them"
    if size > config.num_kv_heads:
        copies, most = size // config.num_kv_heads, config.num_kv_heads
        yield f"every key-value head is held by {copies} ranks: above tp {most} a rank's KV blocks get no smaller"
    if config.vocab_size % size:
        padded = -(-config.vocab_size // size) * size
        yield f"the vocabulary of {config.vocab_size} is padded to {padded} to be split over {size} ranks"
    if config.num_layers % stages:
        yield f"{config.num_layers} layers do not divide over {stages} stages: the earlier ones hold one more"
    if stages > 1 and config.tie_word_embeddings:
        yield "the first and the last stage both hold the shared embedding"
