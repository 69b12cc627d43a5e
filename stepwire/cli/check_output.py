"""What `stepwire check` prints: tables and sentences for people, JSON for programs."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loader.adapters.adapter import Adapter
from loader.adapters.parts import adapter_bytes
from loader.checkpoint import Checkpoint
from loader.errors import CheckpointError
from loader.inspection import Inspection, Problem
from stepwire.cli.checks.finding import human_bytes
from stepwire.cli.checks.memory import read_memory

if TYPE_CHECKING:
    from loader.integrity import Verification

_MOST_RANKS_SHOWN = 16


def print_refusal(error: CheckpointError, *, as_json: bool) -> None:
    """Says why a checkpoint cannot even be opened."""
    if as_json:
        problem = dataclasses.asdict(Problem.of(error))
        click.echo(json.dumps({"usable": False, "problems": [problem], "warnings": []}, indent=2))
    else:
        click.echo(f"not usable: {error}")


def print_inspection_json(
    checkpoint: Checkpoint, found: Inspection, verification: "Verification | None" = None
) -> None:
    """Everything that was found, as one object."""
    config, wish = checkpoint.config, found.wish
    content = {
        "usable": found.is_usable,
        "problems": [dataclasses.asdict(problem) for problem in found.problems],
        "warnings": list(_warnings(found)),
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": config.architecture,
        "fingerprint": checkpoint.fingerprint,
        "files": found.num_files,
        "tensors": found.num_tensors,
        "parameters": found.num_parameters,
        "stored_bytes": checkpoint.total_bytes,
        "stored_dtypes": dict(found.stored_dtypes),
        "dtype": found.dtype,
        "quantisation": None if found.quantisation is None else found.quantisation.method,
        "quantize": wish.quantize,
        "kv_cache_dtype": wish.kv_cache_dtype,
        "tied_embeddings": config.tie_word_embeddings,
        "tokenizer": found.has_tokenizer,
        "chat_template": found.has_chat_template,
        "max_model_len": found.max_model_len,
        "tp": wish.tensor_parallel_size,
        "pp": wish.pipeline_parallel_size,
        "tp_sizes": list(found.tensor_parallel_sizes),
        "max_pp": found.max_pipeline_parallel_size,
        "ranks": [
            {key.removeprefix("num_"): value for key, value in dataclasses.asdict(rank).items()} for rank in found.ranks
        ],
        "host_peak_bytes": sum(rank.host_peak_bytes for rank in found.ranks),
        "memory_bytes": wish.memory_bytes,
        "block_size": wish.block_size,
        "kv_blocks": None if found.fit is None else found.fit.num_blocks,
        "fitting_max_model_len": None if found.fit is None else found.fit.max_model_len,
        "adapters": [_adapter_json(adapter, found) for adapter in found.adapters],
        "verified_files": None if verification is None else list(map(str, verification.verified)),
        "files_without_hash": None if verification is None else list(map(str, verification.unknown)),
    }
    click.echo(json.dumps(content, indent=2))


def _adapter_json(adapter: Adapter, found: Inspection) -> dict[str, Any]:
    return {
        "path": str(adapter.path),
        "max_rank": adapter.max_rank,
        "modules": {
            module.name: {"rank": module.rank, "scaling": module.scaling} for module in adapter.modules.values()
        },
        "full_weights": sorted(adapter.full_weights),
        "stored_bytes": adapter.total_bytes,
        "rank_bytes": _rank_bytes(adapter, found),
    }


def _rank_bytes(adapter: Adapter, found: Inspection) -> list[int]:
    """What each rank holds of an adapter; nothing where the model cannot be split."""
    return [adapter_bytes(adapter, place) for place in found.wish.places()] if found.ranks else []


def print_inspection(checkpoint: Checkpoint, found: Inspection, verification: "Verification | None" = None) -> None:
    """Facts, ranks and adapters as tables, then warnings, problems and the verdict, one a line."""
    # Rich takes as long to import as all of the check: what prints JSON does without.
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in (*_facts(checkpoint, found), *_adapter_facts(found)):
        facts.add_row(name, value)
    console.print(facts)
    if found.ranks:
        ranks = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("PP", "TP", "LAYERS", "KV HEADS", "READ", "WEIGHTS", "HOST PEAK", "KV PER TOKEN"):
            ranks.add_column(heading, justify="right", no_wrap=True)
        for rank in found.ranks[:_MOST_RANKS_SHOWN]:
            numbers = (rank.pipeline_rank, rank.tensor_rank, rank.num_layers, rank.num_kv_heads)
            sizes = (rank.read_bytes, rank.weight_bytes, rank.host_peak_bytes, rank.kv_bytes_per_token)
            ranks.add_row(*map(str, numbers), *map(human_bytes, sizes))
        console.print()
        console.print(ranks)
        if len(found.ranks) > _MOST_RANKS_SHOWN:
            console.print(f"and {len(found.ranks) - _MOST_RANKS_SHOWN} more ranks (--json has all)")
    console.print()
    for text in _verified(verification):
        click.echo(text)
    for warning in _warnings(found):
        click.echo(f"warning: {warning}")
    for line in _verdict(found):
        click.echo(line)


def _verified(verification: "Verification | None") -> Iterator[str]:
    if verification is not None:
        num_files = len(verification.verified) + len(verification.unknown)
        yield f"verified: {len(verification.verified)} of {num_files} files have the SHA-256 that is known of them"
        for path in verification.unknown:
            yield f"not verified: nothing tells the SHA-256 of {_printable(path)}"


def _warnings(found: Inspection) -> Iterator[str]:
    yield from found.warnings
    memory, peak = read_memory(), max((rank.host_peak_bytes for rank in found.ranks), default=0)
    if memory is not None and peak > memory.usable:
        sizes = f"{human_bytes(peak)} of host memory, and this machine has {human_bytes(memory.usable)} left"
        yield f"loading a rank takes up to {sizes}"
    if found.wish.adapters:
        yield "this version serves no adapters: they are checked, and not yet served"


def _facts(checkpoint: Checkpoint, found: Inspection) -> Iterator[tuple[str, str]]:
    config, wish = checkpoint.config, found.wish
    yield "checkpoint", _printable(checkpoint.path)
    yield "model", f"{config.architecture}, {found.num_parameters:,} parameters"
    count = "1 file" if found.num_files == 1 else f"{found.num_files} files"
    held = "complete and well shaped" if config.other is None else "not held against the model"
    yield "stored as", f"{checkpoint.format}, {count}, {found.num_tensors:,} tensors, {held}"
    stored = ", ".join(f"{dtype} {human_bytes(size)}" for dtype, size in found.stored_dtypes.items())
    rounded = "" if wish.quantize in ("auto", "none") else f", rounded to {wish.quantize}"
    yield "types", f"{stored}; held as {found.dtype}{rounded}"
    if found.quantisation is not None:
        yield "quantised", f"{len(found.quantisation.schemes)} products, by {found.quantisation.method}"
    if config.other is None:
        yield "embedding", "shared with the head" if config.tie_word_embeddings else "not shared with the head"
    yield "tokenizer", "there" if found.has_tokenizer else "missing or damaged"
    yield "chat template", "there" if found.has_chat_template else "none"
    yield "tp that work", ", ".join(map(str, found.tensor_parallel_sizes))
    yield "pp that work", f"1 to {found.max_pipeline_parallel_size}"
    yield "context", f"{found.max_model_len:,} tokens; the model was made for {config.max_position_count:,}"
    if len(found.ranks) > 1:
        yield (
            "host peak",
            f"{human_bytes(sum(rank.host_peak_bytes for rank in found.ranks))} with all ranks on one host",
        )
    if found.fit is not None and wish.memory_bytes is not None:
        yield (
            "fits",
            f"{found.fit.num_blocks:,} KV blocks of {wish.block_size} in {human_bytes(wish.memory_bytes)} a rank, "
            f"a context of at most {found.fit.max_model_len:,}; less what activations take",
        )


def _adapter_facts(found: Inspection) -> Iterator[tuple[str, str]]:
    for adapter in found.adapters:
        kinds = Counter(name.rpartition(".")[2] for name in adapter.modules)
        modules = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        full = f", {len(adapter.full_weights)} full weights" if adapter.full_weights else ""
        size = human_bytes(adapter.total_bytes)
        if len(found.ranks) > 1:
            size += f", {human_bytes(max(_rank_bytes(adapter, found)))} a rank"
        yield "adapter", f"{_printable(adapter.path)}: rank {adapter.max_rank}, {modules}{full}, {size}"


def _verdict(found: Inspection) -> Iterator[str]:
    wish = found.wish
    how = f"tp {wish.tensor_parallel_size}, pp {wish.pipeline_parallel_size}, {found.dtype}"
    if found.is_usable:
        yield f"usable: {how}"
        return
    problems = [f"{problem.message}; {problem.remedy}" for problem in found.problems]
    for text in problems[:-1]:
        yield f"problem: {text}"
    yield f"not usable: {problems[-1]}"


def _printable(path: Path) -> str:
    """A path need not be text, and what is printed must be."""
    return os.fsencode(path).decode("utf-8", "replace")
