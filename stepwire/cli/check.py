"""`stepwire check`."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.hf_config import DTYPES
from loader.inspection import Inspection, Wish, inspect_checkpoint
from stepwire.cli.checks.finding import human_bytes
from stepwire.cli.errors import EXIT_FAILURE
from stepwire.cli.field_specs import parse_bytes

_MOST_RANKS_SHOWN = 16
_TOO_LARGE = 1 << 63


def _size(text: str) -> int:
    """A number of bytes, such as 80GiB."""
    try:
        num_bytes = parse_bytes(text)
    except ValueError:
        num_bytes = 0
    if not 1 <= num_bytes < _TOO_LARGE:
        raise click.BadParameter(f"{text!r} is not a size in bytes, such as 80GiB")
    return num_bytes


@click.command()
@click.argument("checkpoint")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", help="Type to hold it in.")
@click.option("--max-model-len", type=click.IntRange(1), help="Longest context; by default the model's own.")
@click.option(
    "--memory", type=_size, metavar="SIZE", help="What each rank may use for weights and KV blocks, such as 80GiB."
)
@click.option(
    "--block-size", type=click.IntRange(1, 256), default=16, show_default=True, help="Token positions of one block."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def check(checkpoint: str, *, as_json: bool, **options: Any) -> int:
    """Tell whether CHECKPOINT can be served, and what it needs. Reads headers, index and configs only.

    CHECKPOINT is a directory with safetensors or a GGUF file. Exits with 0 when it is usable as asked,
    with 1 when it is not, and with 2 for wrong usage.
    """
    wish = Wish(
        tensor_parallel_size=options["tp"],
        pipeline_parallel_size=options["pp"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        memory_bytes=options["memory"],
        block_size=options["block_size"],
    )
    try:
        opened = open_checkpoint(Path(checkpoint))
    except CheckpointError as error:
        _show_refusal(error, as_json=as_json)
        return EXIT_FAILURE
    inspection = inspect_checkpoint(opened, wish)
    if as_json:
        click.echo(json.dumps(_as_json(opened, inspection), indent=2))
    else:
        _show(opened, inspection)
    return 0 if inspection.is_usable else EXIT_FAILURE


def _show_refusal(error: CheckpointError, *, as_json: bool) -> None:
    if not as_json:
        click.echo(f"not usable: {error}")
        return
    problem = {
        "code": error.code,
        "message": error.message,
        "remedy": error.remedy,
        "file": None if error.file is None else str(error.file),
        "tensor": error.tensor,
        "expected": error.expected,
        "found": error.found,
    }
    click.echo(json.dumps({"usable": False, "problems": [problem], "warnings": []}, indent=2))


def _as_json(checkpoint: Checkpoint, found: Inspection) -> dict[str, Any]:
    config = checkpoint.config
    return {
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
        "tied_embeddings": config.tie_word_embeddings,
        "tokenizer": found.has_tokenizer,
        "chat_template": found.has_chat_template,
        "max_model_len": found.max_model_len,
        "tp": found.wish.tensor_parallel_size,
        "pp": found.wish.pipeline_parallel_size,
        "tp_sizes": list(found.tensor_parallel_sizes),
        "max_pp": found.max_pipeline_parallel_size,
        "ranks": [
            {key.removeprefix("num_"): value for key, value in dataclasses.asdict(rank).items()} for rank in found.ranks
        ],
        "memory_bytes": found.wish.memory_bytes,
        "block_size": found.wish.block_size,
        "kv_blocks": None if found.fit is None else found.fit.num_blocks,
        "fitting_max_model_len": None if found.fit is None else found.fit.max_model_len,
    }


def _show(checkpoint: Checkpoint, found: Inspection) -> None:
    # Rich takes as long to import as all of the check: what prints JSON does without.
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(checkpoint, found):
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
    for warning in _warnings(found):
        click.echo(f"warning: {warning}")
    for line in _verdict(found):
        click.echo(line)


def _warnings(found: Inspection) -> Iterator[str]:
    yield from found.warnings
    if len(found.ranks) > 1:
        yield "workers of this version hold a whole model each: a tp or pp above 1 is a plan, not yet served"


def _facts(checkpoint: Checkpoint, found: Inspection) -> Iterator[tuple[str, str]]:
    config, wish = checkpoint.config, found.wish
    # A path need not be text, and what is printed must be.
    yield "checkpoint", os.fsencode(checkpoint.path).decode("utf-8", "replace")
    yield "model", f"{config.architecture}, {found.num_parameters:,} parameters"
    count = "1 file" if found.num_files == 1 else f"{found.num_files} files"
    yield "stored as", f"{checkpoint.format}, {count}, {found.num_tensors:,} tensors, complete and well shaped"
    stored = ", ".join(f"{dtype} {human_bytes(size)}" for dtype, size in found.stored_dtypes.items())
    yield "types", f"{stored}; held as {found.dtype}"
    yield "embedding", "shared with the head" if config.tie_word_embeddings else "not shared with the head"
    yield "tokenizer", "there" if found.has_tokenizer else "missing or damaged"
    yield "chat template", "there" if found.has_chat_template else "none"
    yield "tp that work", ", ".join(map(str, found.tensor_parallel_sizes))
    yield "pp that work", f"1 to {found.max_pipeline_parallel_size}"
    yield "context", f"{found.max_model_len:,} tokens; the model was made for {config.max_position_count:,}"
    if found.fit is not None and wish.memory_bytes is not None:
        yield (
            "fits",
            f"{found.fit.num_blocks:,} KV blocks of {wish.block_size} in {human_bytes(wish.memory_bytes)} a rank, "
            f"a context of at most {found.fit.max_model_len:,}; less what activations take",
        )


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
