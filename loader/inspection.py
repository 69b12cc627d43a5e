"""What a checkpoint needs, and whether it will fit, told from its headers alone. Imports no torch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loader.adapters.adapter import Adapter, open_adapter
from loader.adapters.parts import adapter_bytes
from loader.checkpoint import Checkpoint
from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.hf_config import DTYPES
from loader.layout import (
    max_pipeline_parallel_size,
    pipeline_parallel_problem,
    tensor_parallel_problem,
    tensor_parallel_sizes,
)
from loader.needs import KV_CACHE_DTYPES, RankNeeds, num_parameters, rank_needs
from loader.quantised.config import Quantisation
from loader.quantised.roundings import Rounding
from loader.quantised.settle import QUANTIZE, Quantize, settle
from loader.shares import RankPlace
from loader.tensors import files_of
from loader.text_side import TextSide, look_at_text_side


@dataclass(frozen=True, slots=True)
class Wish:
    """How the checkpoint is to be served. Raises ValueError for a number below 1, and for an unknown dtype or quantize.

    `dtype` is "auto" for the checkpoint's own; `quantize` says what becomes of weights (see `loader.quantised.settle`)
    and `kv_cache_dtype` is the type of keys and values, "auto" for that of the model. `memory_bytes` is what each
    rank may use for weights and KV blocks, `kv_cache_bytes` what it may use for KV blocks alone, `num_kv_blocks` how
    many there are to be; None leaves open what fits. `adapters` are folders of LoRA adapters to be served beside it.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    memory_bytes: int | None = None
    kv_cache_bytes: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    adapters: tuple[Path, ...] = ()
    max_adapter_rank: int | None = None
    quantize: Quantize = "auto"
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, value in (
            ("tensor_parallel_size", self.tensor_parallel_size),
            ("pipeline_parallel_size", self.pipeline_parallel_size),
            ("max_model_len", self.max_model_len),
            ("memory_bytes", self.memory_bytes),
            ("kv_cache_bytes", self.kv_cache_bytes),
            ("num_kv_blocks", self.num_kv_blocks),
            ("block_size", self.block_size),
            ("max_adapter_rank", self.max_adapter_rank),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, and must be at least 1")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype {self.kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
        if self.quantize not in QUANTIZE:
            raise ValueError(f"quantize {self.quantize!r} is not one of {', '.join(QUANTIZE)}")

    def places(self) -> Iterator[RankPlace]:
        """The ranks, stage by stage."""
        for stage in range(self.pipeline_parallel_size):
            for rank in range(self.tensor_parallel_size):
                yield RankPlace(rank, self.tensor_parallel_size, stage, self.pipeline_parallel_size)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the checkpoint cannot be served as wished: a code for programs, what is wrong, and what to do.

    `code` is that of a CheckpointError, or "tensor_parallel", "pipeline_parallel", "max_model_len", "out_of_memory".
    `file`, `tensor`, `expected` and `found` say it again for programs, where they apply.
    """

    code: str
    message: str
    remedy: str
    file: str | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None

    @classmethod
    def of(cls, error: CheckpointError) -> "Problem":
        """What an error of the loader says."""
        file = None if error.file is None else str(error.file)
        return cls(error.code, error.message, error.remedy, file, error.tensor, error.expected, error.found)


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits on the rank with least room; activations, which a worker measures, come on top."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a checkpoint before any weight is read.

    `stored_dtypes` maps a storage type to the bytes stored in it. `ranks` is empty where the model cannot be split
    as wished, and `fit` is None then, and where nothing bounds the KV blocks. `max_model_len` is the one wished, or
    the longest that the model was made for. `adapters` are those that can be used. `quantisation` is that of the
    weights of the checkpoint that stay quantised.
    """

    wish: Wish
    dtype: str
    quantisation: Quantisation | None
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
    adapters: tuple[Adapter, ...]
    fit: Fit | None
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]

    @property
    def is_usable(self) -> bool:
        """Whether it can be served as wished, as far as headers tell."""
        return not self.problems


def inspect_checkpoint(checkpoint: Checkpoint, wish: Wish) -> Inspection:
    """Holds an opened checkpoint, whose tensors are complete and well shaped, against a wish.

    Reads of files only the small ones beside the weights, and headers of adapters; what it finds wrong is among the
    problems.
    """
    text = look_at_text_side(checkpoint)
    problems = [Problem.of(error) for error in text.errors]
    try:
        checkpoint, rounding = settle(checkpoint, wish.quantize)
    except CheckpointError as error:
        problems.append(Problem.of(error))
        rounding = None
    config = checkpoint.config
    dtype = config.dtype if wish.dtype == "auto" else wish.dtype
    adapters = _open_adapters(config, wish, problems)
    unsplit = list(_split_problems(config, wish))
    problems += unsplit
    ranks = () if unsplit else _needs(checkpoint, wish, (dtype, rounding), adapters, problems)
    fit = _fit(config, ranks, wish)
    problems += _length_problems(config, wish, fit, ranks)
    return Inspection(
        wish=wish,
        dtype=dtype,
        quantisation=config.quantisation,
        num_files=len(files_of(checkpoint.tensors.values())),
        num_tensors=len(checkpoint.tensors),
        num_parameters=num_parameters(config),
        stored_dtypes=_stored_dtypes(checkpoint),
        has_tokenizer=text.has_tokenizer,
        has_chat_template=text.has_chat_template,
        tensor_parallel_sizes=tensor_parallel_sizes(config),
        max_pipeline_parallel_size=max_pipeline_parallel_size(config),
        max_model_len=wish.max_model_len or config.max_position_count,
        ranks=ranks,
        adapters=adapters,
        fit=fit,
        problems=tuple(problems),
        warnings=tuple(_warnings(checkpoint, wish, dtype, text)),
    )


def _open_adapters(config: ModelConfig, wish: Wish, problems: list[Problem]) -> tuple[Adapter, ...]:
    opened = []
    for path in wish.adapters:
        try:
            opened.append(open_adapter(path, config, max_rank=wish.max_adapter_rank))
        except CheckpointError as error:
            problems.append(Problem.of(error))
    return tuple(opened)


def _split_problems(config: ModelConfig, wish: Wish) -> Iterator[Problem]:
    size, stages = wish.tensor_parallel_size, wish.pipeline_parallel_size
    reason = tensor_parallel_problem(config, size)
    if reason is not None:
        sizes = ", ".join(map(str, tensor_parallel_sizes(config)))
        message = f"tp {size} does not work: {reason}"
        yield Problem("tensor_parallel", message, f"use one of tp {sizes}", expected=sizes, found=str(size))
    reason = pipeline_parallel_problem(config, stages)
    if reason is not None:
        most = max_pipeline_parallel_size(config)
        message, expected = f"pp {stages} does not work: {reason}", f"1 to {most}" if most > 1 else "1"
        yield Problem("pipeline_parallel", message, f"use a pp of {expected}", expected=expected, found=str(stages))


def _needs(
    checkpoint: Checkpoint,
    wish: Wish,
    held_as: tuple[str, Rounding | None],
    adapters: Sequence[Adapter],
    problems: list[Problem],
) -> tuple[RankNeeds, ...]:
    """What each rank needs; nothing where some rank's part is not there whole, which is a problem then."""
    try:
        return tuple(
            rank_needs(
                checkpoint,
                place,
                held_as[0],
                sum(adapter_bytes(adapter, place) for adapter in adapters),
                held_as[1],
                wish.kv_cache_dtype,
            )
            for place in wish.places()
        )
    except CheckpointError as error:
        problems.append(Problem.of(error))
        return ()


def _fit(config: ModelConfig, ranks: Sequence[RankNeeds], wish: Wish) -> Fit | None:
    limits = [] if wish.num_kv_blocks is None or not ranks else [wish.num_kv_blocks]
    for rank in ranks:
        block_bytes = rank.kv_bytes_per_token * wish.block_size
        if wish.memory_bytes is not None:
            limits.append((wish.memory_bytes - rank.resident_bytes) // block_bytes)
        if wish.kv_cache_bytes is not None:
            limits.append(wish.kv_cache_bytes // block_bytes)
    if not limits:
        return None
    num_blocks = max(0, min(limits))
    return Fit(num_blocks, min(num_blocks * wish.block_size, config.max_position_count))


def _length_problems(config: ModelConfig, wish: Wish, fit: Fit | None, ranks: Sequence[RankNeeds]) -> Iterator[Problem]:
    longest = config.max_position_count
    wanted = wish.max_model_len or longest
    if wanted > longest:
        message = f"max_model_len is {wanted} and the model was made for {longest} tokens"
        remedy = f"use a max_model_len of at most {longest}"
        yield Problem("max_model_len", message, remedy, expected=f"at most {longest}", found=str(wanted))
    wanted = min(wanted, longest)
    if fit is None or fit.max_model_len >= wanted:
        return
    if fit.num_blocks == 0 and wish.memory_bytes is not None:
        weights = max(rank.resident_bytes for rank in ranks)
        message = f"the weights of a rank take {weights} bytes, and beside them {wish.memory_bytes} hold no KV block"
        yield Problem("out_of_memory", message, "give more memory, or use more ranks or a smaller model")
        return
    needed = -(-wanted // wish.block_size)
    bound, remedy = _bound(wish, fit)
    message = f"one sequence of max_model_len = {wanted} tokens needs {needed} KV blocks and {bound}"
    if fit.max_model_len:
        remedy = f"lower max_model_len to at most {fit.max_model_len}, or {remedy}"
    yield Problem("out_of_memory", message, remedy, expected=f"{needed} blocks", found=f"{fit.num_blocks} blocks")


def _bound(wish: Wish, fit: Fit) -> tuple[str, str]:
    """What bounds the KV blocks, and how to have more."""
    if wish.num_kv_blocks == fit.num_blocks:
        return f"num_kv_blocks asks for {fit.num_blocks}", "raise num_kv_blocks"
    if wish.memory_bytes is None:
        return f"the {wish.kv_cache_bytes} bytes of kv_cache_bytes hold {fit.num_blocks}", "raise kv_cache_bytes"
    return f"beside the weights {wish.memory_bytes} bytes hold {fit.num_blocks}", "give more memory"


def _stored_dtypes(checkpoint: Checkpoint) -> Mapping[str, int]:
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.dtype] += info.num_bytes
    return dict(sizes.most_common())


def _warnings(checkpoint: Checkpoint, wish: Wish, dtype: str, text: TextSide) -> Iterator[str]:
    config = checkpoint.config
    size, stages = wish.tensor_parallel_size, wish.pipeline_parallel_size
    if not text.has_chat_template:
        yield "there is no chat template: prompts can be continued, chats cannot be answered"
    if config.other is not None:
        yield (
            f"{config.architecture} is none of our own models: a worker runs transformers' definition of it, slower, "
            "if transformers knows it and it follows its attention interface; sizes are what its config.json says"
        )
    if not config.eos_token_ids:
        yield "no end token is named: a sequence ends by length or stop string only"
    if config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
        yield "the shared embedding is stored twice: loading compares the two, and fails where they differ"
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
