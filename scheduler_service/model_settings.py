"""Everything an operator can set about one model that a scheduler serves."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from scheduler_service.engine.validate import check_adapter_name
from stepwire.rpc.errors import StepwireError

MAX_MODELS = 64
_MAX_SHOWN_LEN = 256

OWN_FIELDS = frozenset({"model", "served_model_name", "workers", "adapter"})
"""What each model has for itself, where the other settings of a service hold for all of its models."""


def parse_adapters(entries: list[str]) -> dict[str, str]:
    """Paths by name of entries NAME=PATH, made absolute. Raises ValueError."""
    found: dict[str, str] = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not separator or not path:
            raise ValueError(f"{entry!r} is not NAME=PATH")
        try:
            check_adapter_name("name", name)
        except StepwireError as error:
            raise ValueError(f"{entry!r}: {error}") from error
        if name in found:
            raise ValueError(f"{name} is named twice")
        found[name] = os.path.abspath(os.path.expanduser(path))
    return found


def name_of(model: str, served_model_name: str | None) -> str:
    """The name of a model: the one that is set, else the last part of its path."""
    return served_model_name or Path(model).name.removesuffix(".gguf") or "model"


def check_name(name: str) -> str:
    """The name, if it can be that of a model. Raises ValueError.

    It is written in logs, in metrics and on the command line of a scheduler that takes the place of another.
    """
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"{name[:_MAX_SHOWN_LEN]!r} has characters that cannot be printed, or spaces at its ends")
    return name


class ModelSettings(BaseModel):
    """Settings of one model and of the worker groups that serve it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        min_length=1,
        description=(
            "Checkpoint: a directory, a GGUF file, a Hub id (org/name[@revision]) or a URL. "
            "Workers read it under the path that it has here."
        ),
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Name that clients use; by default the last part of the path.",
    )
    workers: list[str] = Field(
        default=["127.0.0.1:50061"],
        min_length=1,
        max_length=1024,
        description="Address of each worker, host:port: of a group all tensor ranks of the first stage, then the next.",
    )
    tp: int = Field(default=1, ge=1, le=1024, description="Tensor-parallel ranks: workers that share each layer.")
    pp: int = Field(default=1, ge=1, le=256, description="Pipeline stages: workers that have some of the layers each.")
    replicas: int = Field(
        default=1, ge=1, le=256, description="Groups of tp x pp workers that serve the model side by side."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights in memory; auto takes the checkpoint's own."
    )
    quantize: Literal["auto", "none", "int8", "int4", "fp8"] = Field(
        default="auto",
        description="What becomes of weights: auto keeps them as they are stored, none makes those of a GGUF whole, "
        "the others quantise what is whole, or can be made so, while it is read.",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto", description="Type of keys and values in the cache; auto takes that of the model."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Most tokens of prompt and output together; by default what the model was made for.",
    )
    fit_max_model_len: bool = Field(
        default=False, description="Lower max_model_len to what the KV blocks hold, rather than refuse to start."
    )
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="Most sequences that run at once.")
    max_num_batched_tokens: int = Field(default=512, ge=1, le=1_048_576, description="Most tokens of one step.")
    block_size: int = Field(default=16, ge=1, le=256, description="Token positions of one KV block.")
    num_kv_blocks: int | None = Field(
        default=None, ge=1, le=16_777_216, description="Number of KV blocks; by default what the workers' memory holds."
    )
    prefix_caching: bool = Field(default=True, description="Reuse the KV blocks of prompts that begin alike.")
    max_draft_tokens: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Most tokens that a step looks up and verifies for each sequence whose request does not say: "
        "speculative decoding, for text that quotes its prompt. They take places of max_num_seqs.",
    )
    max_queued_requests: int = Field(
        default=1024, ge=1, le=1_000_000, description="Most requests that wait; one more is refused at once."
    )
    max_queued_tokens: int = Field(
        default=1_000_000, ge=1, le=1_000_000_000, description="Most prompt tokens that wait; more are refused at once."
    )
    ageing_seconds: float = Field(
        default=30.0, gt=0, le=86_400, description="Seconds of waiting that lift a request by one priority."
    )
    worker_timeout: float = Field(default=60.0, gt=0, le=86_400, description="Seconds to reach the workers at start.")
    step_timeout: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="Seconds after which a step counts as hung, or 20 times the slowest percent of steps if longer.",
    )
    restart_budget: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="How many times in a row workers may be lost, or not come back, without a step in between; once "
        "more ends the service.",
    )
    sleep_running: Literal["finish", "preempt"] = Field(
        default="finish",
        description="What AdminService's Sleep does with sequences that run: wait for their ends, or preempt them.",
    )
    sleep_arrivals: Literal["wait", "refuse"] = Field(
        default="wait",
        description="What becomes of requests that arrive while the workers sleep; where they are refused, the health "
        "service says NOT_SERVING.",
    )
    flight_steps: int = Field(
        default=256, ge=0, le=10_000, description="Steps that the flight recorder keeps in memory; 0 keeps none."
    )
    grammar_timeout: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Seconds in which the form of output that a request asks for must compile.",
    )
    adapter: list[str] = Field(
        default=[], description="LoRA adapter to load at the start, as NAME=PATH; workers read it under that path."
    )
    max_adapters: int = Field(default=64, ge=1, le=1024, description="Most adapters that are loaded.")

    @property
    def name(self) -> str:
        """The name that clients use."""
        return name_of(self.model, self.served_model_name)

    @property
    def path(self) -> str:
        """Where the checkpoint lies, as workers are told it."""
        # Links stay: a hub cache links to blobs whose names say nothing.
        return os.path.abspath(os.path.expanduser(self.model))

    @property
    def num_ranks(self) -> int:
        """Workers of one replica."""
        return self.tp * self.pp

    @property
    def groups(self) -> list[list[str]]:
        """The addresses of each replica's workers, by rank."""
        return [self.workers[i : i + self.num_ranks] for i in range(0, len(self.workers), self.num_ranks)]

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters to load at the start: paths by name."""
        return parse_adapters(self.adapter)

    @property
    def is_template(self) -> bool:
        """Whether no model is served by these very settings: others are, which have them in common."""
        return False

    def of_another(self, values: Mapping[str, object]) -> "ModelSettings":
        """The settings of another model: `values`, and of these what is no model's own. Raises ValidationError."""
        common = {name: getattr(self, name) for name in ModelSettings.model_fields if name not in OWN_FIELDS}
        return ModelSettings.model_validate({**common, **values})

    @field_validator("adapter")
    @classmethod
    def _check_adapters(cls, entries: list[str]) -> list[str]:
        parse_adapters(entries)
        return entries

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        try:
            check_name(self.name)
        except ValueError as error:
            raise ValueError(f"the name {error}; set served_model_name to another") from error
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        num_wanted = self.replicas * self.num_ranks
        if self.is_template:
            return self
        if len(self.workers) != num_wanted:
            times = f" x replicas {self.replicas}" if self.replicas > 1 else ""
            raise ValueError(
                f"workers names {len(self.workers)}, and tp {self.tp} x pp {self.pp}{times} takes {num_wanted}"
            )
        if len(set(self.workers)) < len(self.workers):
            raise ValueError("workers names an address twice")
        return self

    @model_validator(mode="after")
    def _check_step_size(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running sequences starve"
            )
        return self
