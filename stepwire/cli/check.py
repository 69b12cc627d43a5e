"""`stepwire check`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loader.checkpoint import Checkpoint, open_checkpoint
from loader.errors import CheckpointError
from loader.hf_config import DTYPES
from loader.inspection import Wish, inspect_checkpoint
from loader.needs import KV_CACHE_DTYPES
from loader.quantised.settle import QUANTIZE
from loader.sources.resolve import resolve
from stepwire.cli.check_output import print_inspection, print_inspection_json, print_refusal
from stepwire.cli.errors import EXIT_FAILURE
from stepwire.cli.field_specs import parse_bytes

if TYPE_CHECKING:
    from loader.integrity import Verification

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
@click.option(
    "--quantize",
    type=click.Choice(QUANTIZE),
    default="auto",
    show_default=True,
    help="Keep weights as they are stored, make those of a GGUF whole, or round what is whole.",
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(KV_CACHE_DTYPES), default="auto", help="Type of keys and values in the cache."
)
@click.option("--max-model-len", type=click.IntRange(1), help="Longest context; by default the model's own.")
@click.option(
    "--memory", type=_size, metavar="SIZE", help="What each rank may use for weights and KV blocks, such as 80GiB."
)
@click.option(
    "--block-size", type=click.IntRange(1, 256), default=16, show_default=True, help="Token positions of one block."
)
@click.option("--adapter", multiple=True, metavar="PATH", help="Folder of a LoRA adapter to check with it; repeatable.")
@click.option("--max-adapter-rank", type=click.IntRange(1), help="Highest rank that an adapter may have.")
@click.option("--verify", is_flag=True, help="Read all files, and hold them against the hashes known of them.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def check(checkpoint: str, *, as_json: bool, **options: Any) -> int:
    """Tell whether CHECKPOINT can be served, and what it needs. Reads headers, index and configs only.

    CHECKPOINT is a directory, a GGUF file, a Hub id (org/name) or a URL; what is elsewhere is brought here first. Exits
    with 0 when it is usable as asked, adapters included, with 1 when it is not, and with 2 for wrong usage.
    """
    wish = Wish(
        tensor_parallel_size=options["tp"],
        pipeline_parallel_size=options["pp"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        memory_bytes=options["memory"],
        block_size=options["block_size"],
        adapters=tuple(Path(path) for path in options["adapter"]),
        max_adapter_rank=options["max_adapter_rank"],
        quantize=options["quantize"],
        kv_cache_dtype=options["kv_cache_dtype"],
    )
    try:
        with resolve(checkpoint, report=_say) as found:
            opened = open_checkpoint(found.path)
            verification = _verify(opened) if options["verify"] else None
            inspection = inspect_checkpoint(opened, wish)
    except CheckpointError as error:
        print_refusal(error, as_json=as_json)
        return EXIT_FAILURE
    if as_json:
        print_inspection_json(opened, inspection, verification)
    else:
        print_inspection(opened, inspection, verification)
    return 0 if inspection.is_usable else EXIT_FAILURE


def _verify(checkpoint: Checkpoint) -> "Verification":
    from loader.integrity import verify_files

    return verify_files(checkpoint, lambda _done, _total: None, lambda: False, again=True)


def _say(text: str) -> None:
    click.echo(f"stepwire check: {text}", err=True)
