"""Models of none of our families: transformers' own definition of them, with our attention plugged in.

Slower than a family of ours, and the reference these are tested against. Over several ranks each has its part of the
definition, by `loader.other_split`. A definition that does not follow
transformers' attention interface, or follows it in name only, is refused when its weights are placed.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.utils import logging

from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.shares import RankPlace
from worker_service.kernels.quantised import MakeLinear, make_joined_linear
from worker_service.models.attention_hook import PROBING, SERVING, ForwardPass, register_attention, run
from worker_service.models.collectives import Collectives
from worker_service.models.decoder import Attention
from worker_service.models.layers import Tensors
from worker_service.models.lora import RowAdapters
from worker_service.models.scores import Scores
from worker_service.models.transformers_part import DefinitionPart
from worker_service.models.transformers_probe import (
    FIRST,
    LENGTHS,
    PlainAttention,
    check_calls,
    check_error,
    layer_windows,
    probe_tokens,
    recorded,
)
from worker_service.runtime.shortage import is_out_of_memory

# Their frequencies follow the longest sequence in a batch: what one gets would depend on the others.
_BATCH_ROPES = ("dynamic", "longrope")
_OUR_OWN_OR_GGUF = "use a model of one of the families that stepwire computes itself"


class TransformersModel:
    """This rank's part of a causal LM by transformers' definition; what `Decoder` is for our own families.

    `num_kv_heads`, `windows`, `scores`, `layers` and the head size in `config` are those of the definition from
    `place_weights` on, and before that what config.json says.
    """

    def __init__(self, config: ModelConfig, place: RankPlace, group: Collectives | None) -> None:
        """Raises CheckpointError for a class that transformers does not know, ValueError for one that cannot be split
        over the group."""
        if config.other is None:
            raise ValueError(f"{config.architecture} is one of our own families")
        self._class, self._hf_config = _definition(config)
        self._part = DefinitionPart(config, place, group)
        self.config = config
        self.rank_place = place
        self.num_kv_heads = config.num_kv_heads
        self.layers = self._part.layers
        self.windows: list[int | None] = [None] * len(self.layers)
        self.scores = [Scores(config.head_dim**-0.5)] * len(self.layers)
        with self._names_what_fails():
            self._check_config()
        self._base: Callable[..., Any] = _not_placed
        self._head: PreTrainedModel | None = None
        self._computed = _Computed()

    def place_weights(self, tensors: Tensors, _make: MakeLinear = make_joined_linear, /) -> int:
        """Takes all of `tensors` into the definition, and holds it to its interface. None is quantised.

        Answers the bytes of its weights. Raises CheckpointError "invalid" for tensors that are missing, too many or
        of another shape; "unsupported", with the reason, for a definition that cannot be served.
        """
        with self._names_what_fails():
            model = self._load(tensors)
            self._part.finish()
            with self._part.alone():
                inputs = self._probe_inputs(model)
                expected = [self._by_itself(model, each) for each in inputs]
                self._read_interface(model, inputs[0])
                self._take_apart(model)
                self._compare(inputs, expected)
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) + self._base_bytes()

    def prepare(self, served_length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing to do: definitions make what depends on positions themselves."""

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        """Token ids [num_tokens], or hidden states [num_tokens, hidden_size] on a stage after the first -> hidden
        states [num_tokens, hidden_size], on the last stage normalised."""
        assert adapters is None, "a definition of transformers takes none"
        return self._forward(x, positions, ForwardPass(attention))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] of `forward` -> [rows, vocab_size]."""
        head = self._head
        if head is None:
            raise RuntimeError("the weights have not been placed")
        self._computed.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        made: torch.Tensor = head(input_ids=ids, use_cache=False).logits[0]
        return made

    def _forward(self, x: torch.Tensor, positions: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        made: Any = run(forward_pass, lambda: self._call(self._base, x, position_ids=positions[None]))
        if not self.rank_place.is_last_stage:
            return self._part.take_leaving()
        hidden: torch.Tensor = made.last_hidden_state[0]
        self._computed.output_class = type(made)
        return hidden

    def _call(self, definition: Callable[..., Any], x: torch.Tensor, **more: object) -> Any:
        """A pass of the definition over one row of `x`, which is as for `forward`."""
        if self.rank_place.is_first_stage:
            return definition(input_ids=x[None], use_cache=False, **more)
        token_ids = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
        with self._part.given(x):
            return definition(input_ids=token_ids, use_cache=False, **more)

    def _load(self, tensors: Tensors) -> PreTrainedModel:
        """The definition with these weights; transformers' own loader fuses, renames and ties what it must."""
        first = next(iter(tensors.values()))
        with _quietly():
            model, info = self._rank_class().from_pretrained(
                None,
                config=self._hf_config,
                state_dict=dict(tensors),
                dtype=first.dtype,
                attn_implementation="eager",
                output_loading_info=True,
            )
        tensors.clear()
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if info[what]:
                some = ", ".join(sorted(map(str, info[what]))[:3])
                raise CheckpointError(
                    "invalid",
                    f"transformers' {self.config.architecture} has {len(info[what])} {what.replace('_', ' ')}: {some}",
                    "check that config and weights belong together, and that no file is missing",
                    tensor=some[:200],
                )
        return cast(PreTrainedModel, model.to(first.device).eval())

    def _rank_class(self) -> Any:
        """The class, or one like it whose instances are this rank's part."""
        whole, part = self._class, self._part
        if part.is_whole:
            return whole
        if not part.shares_embedding:
            self._hf_config.get_text_config().tie_word_embeddings = False
            self._hf_config.tie_word_embeddings = False

        def build(model: Any, *inputs: Any, **named: Any) -> None:
            whole.__init__(model, *inputs, **named)
            part.cut(model)

        # Under its name, by which transformers knows how tensors are renamed.
        return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})

    def _read_interface(self, model: PreTrainedModel, x: torch.Tensor) -> None:
        """Takes from one pass of the definition what its layers ask of attention."""
        register_attention()
        base = _base_of(model)
        if "position_ids" not in inspect.signature(base.forward).parameters:
            raise ValueError("it does not take the positions of tokens")
        self._base = base
        self._use(model, PROBING)
        attention = PlainAttention()
        attention.counts = (len(x),)
        asked = recorded(attention)
        hidden = self._forward(x, torch.arange(len(x), device=x.device), asked)
        if hidden.shape != (len(x), self.config.hidden_size) or hidden.dtype != model.dtype:
            raise ValueError("it hands hidden states of another size or type from layer to layer")
        first = check_calls(asked.calls, len(self.layers))
        self.config = replace(self.config, head_dim=first.query_shape[-1])
        self.num_kv_heads = first.key_shape[1]
        self.windows = layer_windows(asked.calls, self.config.max_position_count)
        self.scores = [call.scores for call in asked.calls]
        self._use(model, SERVING)

    def _check_config(self) -> None:
        """What the scheduler read from config.json must be what transformers reads."""
        ours, theirs = self.config, self._hf_config.get_text_config()
        for name, value in (
            ("vocab_size", ours.vocab_size),
            ("num_hidden_layers", ours.num_layers),
            ("max_position_embeddings", ours.max_position_count),
        ):
            if getattr(theirs, name, value) != value:
                raise ValueError(f"its {name} is {getattr(theirs, name)}, and its config.json was read as {value}")

    @staticmethod
    def _use(model: PreTrainedModel, name: str) -> None:
        with _quietly():
            model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ValueError("it does not follow transformers' attention interface")

    def _take_apart(self, model: PreTrainedModel) -> None:
        """Leaves of the definition its head alone: what it makes of hidden states is asked for a few of them."""
        setattr(model, model.base_model_prefix, self._computed)
        self._head = model

    def _probe_inputs(self, model: PreTrainedModel) -> list[torch.Tensor]:
        """What the sequences of the probe give this stage."""
        if self.rank_place.is_first_stage:
            return [torch.tensor(ids, device=model.device) for ids in probe_tokens(self.config.vocab_size)]
        drawn = torch.Generator().manual_seed(0)
        hidden = (torch.randn(n, self.config.hidden_size, generator=drawn) for n in LENGTHS)
        return [each.to(model.device, model.dtype) for each in hidden]

    def _by_itself(self, model: PreTrainedModel, x: torch.Tensor) -> torch.Tensor:
        """One sequence of the probe with transformers' own attention -> logits or, before the last stage, hidden
        states."""
        is_last = self.rank_place.is_last_stage
        with torch.inference_mode():
            made = self._call(model if is_last else _base_of(model), x)
            return cast(torch.Tensor, made.logits[0]) if is_last else self._part.take_leaving()

    def _compare(self, inputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        """Both sequences of the probe at once, in two steps, against each by itself with transformers' attention."""
        device = expected[0].device
        attention = PlainAttention(self.scores, self.windows)
        starts: tuple[int, ...] = (0,) * len(LENGTHS)
        for stops in (FIRST, LENGTHS):
            spans = list(zip(starts, stops, strict=True))
            attention.counts = [stop - start for start, stop in spans]
            x = torch.cat([each[start:stop] for each, (start, stop) in zip(inputs, spans, strict=True)])
            positions = [place for start, stop in spans for place in range(start, stop)]
            with torch.inference_mode():
                got = self.forward(x, torch.tensor(positions, device=device), attention)
                if self.rank_place.is_last_stage:
                    got = self.logits(got)
            check_error(got, torch.cat([row[start:stop] for row, (start, stop) in zip(expected, spans, strict=True)]))
            starts = stops
        if self.rank_place.is_last_stage and got.shape[-1] != self.config.vocab_size:
            raise ValueError(f"it has logits of {got.shape[-1]} tokens, not {self.config.vocab_size}")

    def _base_bytes(self) -> int:
        base = cast(torch.nn.Module, self._base)
        # A head that shares the embedding's weight has been counted.
        own = {id(tensor) for tensor in self._head.parameters()} if self._head is not None else set()
        return sum(tensor.nbytes for tensor in (*base.parameters(), *base.buffers()) if id(tensor) not in own)

    @contextmanager
    def _names_what_fails(self) -> Iterator[None]:
        """Definitions are others' code: whatever goes wrong in one while it is tried is a reason to refuse it."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            text = str(error) or type(error).__name__
            raise CheckpointError(
                "unsupported",
                f"transformers' definition of {self.config.architecture} cannot be served: {text[:500]}",
                _OUR_OWN_OR_GGUF if self._part.is_whole else f"serve it with tp 1 and pp 1, or {_OUR_OWN_OR_GGUF}",
                expected="a definition that follows transformers' attention interface",
                found=self.config.architecture,
            ) from error


class _Computed(torch.nn.Module):
    """Stands for the layers of a definition whose hidden states are there already."""

    hidden: torch.Tensor
    output_class: Callable[..., object]

    @property
    def decoder(self) -> "_Computed":
        """Itself: some definitions ask a part of their base model."""
        return self

    def forward(self, *_inputs: object, **_others: object) -> object:
        """The hidden states, as the definition's own layers answer them."""
        return self.output_class(last_hidden_state=self.hidden)


def _definition(config: ModelConfig) -> tuple[Any, Any]:
    """The class and its config. Raises CheckpointError for one that transformers does not know as a causal LM."""
    content: Mapping[str, object] = config.other.content if config.other is not None else {}
    model_type = str(content.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise _unknown(config, f"transformers knows no model type {model_type[:100]!r}")
    try:
        hf_config = CONFIG_MAPPING[model_type].from_dict(dict(content))
    except Exception as error:
        raise _unknown(config, f"transformers does not take its config.json: {str(error)[:300]}") from error
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if getattr(found, "__name__", None) != config.architecture:
        raise _unknown(config, f"transformers' causal LM of the model type {model_type!r} is not that class")
    ropes = str(getattr(hf_config, "rope_parameters", None))
    for kind in _BATCH_ROPES:
        if f"'{kind}'" in ropes:
            raise _unknown(config, f"its {kind} rotary embedding would make results depend on the batch")
    return found, hf_config


def _unknown(config: ModelConfig, reason: str) -> CheckpointError:
    return CheckpointError(
        "unsupported",
        f"architecture {config.architecture} is not supported: {reason}",
        _OUR_OWN_OR_GGUF,
        expected="a causal LM that transformers knows",
        found=config.architecture,
    )


def _base_of(model: PreTrainedModel) -> PreTrainedModel:
    base = getattr(model, model.base_model_prefix, None)
    if not isinstance(base, PreTrainedModel):
        raise ValueError("its layers are not apart from its head")
    return base


def _not_placed(**_inputs: object) -> object:
    raise RuntimeError("the weights have not been placed")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' bars and advice: what matters of them is raised."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
