"""Everything an operator can set about a scheduler. The command line is generated from these fields."""

from collections import Counter
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from scheduler_service.engine.tenants import (
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    TenantRules,
    parse_priorities,
    parse_weights,
)
from scheduler_service.model_settings import MAX_MODELS, ModelSettings


class SchedulerSettings(ModelSettings):
    """Settings of one scheduler process, and of the only model that it serves, unless `models` names several.

    Then what is set of a model here is what those have in common that say nothing else.
    """

    models: list[ModelSettings] = Field(
        default=[],
        max_length=MAX_MODELS,
        description="Models that are served side by side, instead of one `model`; each with settings of its own, as "
        "model=PATH,served_model_name=NAME,KEY=VALUE. The first is the one that requests without a name mean.",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=50051, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_priority: int = Field(
        default=HIGHEST_PRIORITY,
        ge=LOWEST_PRIORITY,
        le=HIGHEST_PRIORITY,
        description="Highest priority that a request may ask for.",
    )
    tenant_max_priorities: list[str] = Field(
        default=[], description="Highest priority of single tenants instead, as NAME=PRIORITY."
    )
    tenant_weights: list[str] = Field(
        default=[], description="Share of the device of single tenants, as NAME=WEIGHT; others have weight 1."
    )
    shutdown_timeout: float = Field(
        default=30.0, ge=0, le=86_400, description="Seconds that running requests get to end after SIGTERM."
    )
    flight_dir: str = Field(
        default="~/.cache/stepwire/flight",
        min_length=1,
        max_length=4096,
        description="Folder for flight recordings, written when workers fail; the last eight are kept.",
    )
    cluster_key: str | None = Field(
        default=None,
        min_length=16,
        # As the workers have it: gRPC refuses other characters in metadata.
        pattern=r"^[\x21-\x7e]+$",
        repr=False,
        description="Key that the workers ask for; needed off loopback.",
    )
    admin_key: str | None = Field(
        default=None,
        min_length=16,
        pattern=r"^[\x21-\x7e]+$",
        repr=False,
        description="Key that AdminService asks for, another one than the cluster key; without it there is none.",
    )
    model_roots: list[str] = Field(
        default=[],
        max_length=64,
        description="Folders that models may be loaded from while serving; empty allows any path, on loopback only.",
    )
    adapter_roots: list[str] = Field(
        default=[],
        max_length=64,
        description="Folders that adapters may be loaded from while serving; empty allows any path, on loopback only.",
    )
    otlp_endpoint: str | None = Field(
        default=None, description="OTLP/gRPC endpoint for traces, such as http://127.0.0.1:4317; none sends no traces."
    )
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of requests traced when the client did not decide."
    )
    trace_step_ratio: float = Field(
        default=0.01, ge=0, le=1, description="Share of the steps of sampled requests that get a trace of their own."
    )
    trace_slow_step: float = Field(
        default=1.0, gt=0, le=86_400, description="Seconds from which on a step is traced whatever that share is."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port that answers Prometheus at /metrics, on the same host; 0 takes any free one. "
        "With `serve` the worker's is the one above.",
    )
    log_format: Literal["auto", "json", "pretty"] = Field(
        default="auto", description="auto is pretty on a terminal, JSON elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )

    @property
    def all_models(self) -> "list[ModelSettings]":
        """The settings of each model."""
        return self.models or [self]

    @property
    def is_template(self) -> bool:
        """See ModelSettings."""
        return bool(self.models)

    @property
    def tenant_rules(self) -> TenantRules:
        """What is configured of tenants."""
        return TenantRules(
            parse_weights(self.tenant_weights), parse_priorities(self.tenant_max_priorities), self.max_priority
        )

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, entries: list[str]) -> list[str]:
        parse_weights(entries)
        return entries

    @field_validator("tenant_max_priorities")
    @classmethod
    def _check_priorities(cls, entries: list[str]) -> list[str]:
        parse_priorities(entries)
        return entries

    @model_validator(mode="before")
    @classmethod
    def _take_first_model(cls, values: Any) -> Any:
        models = values.get("models") if isinstance(values, dict) else None
        if not models:
            return values
        first = models[0].model if isinstance(models[0], ModelSettings) else models[0].get("model")
        return {"model": first, **values}

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = Counter(model.name for model in self.models)
        workers = Counter(address for model in self.models for address in model.workers)
        for what, counts in (("served_model_name", names), ("workers", workers)):
            if twice := [name for name, count in counts.items() if count > 1]:
                raise ValueError(f"models: {what} {', '.join(twice)} is that of more than one model; give each its own")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.admin_key is not None and self.admin_key == self.cluster_key:
            raise ValueError("admin_key is the cluster_key: whoever may command workers need not be an operator")
        return self
