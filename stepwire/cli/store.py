"""`stepwire store`."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from loader.store.errors import EntryDamaged, EntryInUse, StoreBusy, StoreRefused
from loader.store.folder import Entry, StoreFolder, default_folder
from loader.store.mapping import map_entry
from stepwire.cli.checks.finding import human_bytes
from stepwire.cli.errors import EXIT_FAILURE, CommandError
from stepwire.cli.tables import ago, print_table

_HEADINGS = ("KEY", "MODEL", "RANK", "DTYPE", "QUANTISATION", "BYTES", "LAST USED", "IN USE BY")
_SHORT_KEY = 12
# Settings that name no folder.
_NO_FOLDER = ("", "auto", "off")


def _folder_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--folder",
        envvar="STEPWIRE_RESTART_STORE",
        default="auto",
        show_default=True,
        metavar="PATH",
        help="The store; as the worker's setting restart_store.",
    )(command)


@click.group()
def store() -> None:
    """Show, verify or evict the weights that are kept in memory for restarts."""


@store.command("list")
@_folder_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_entries(folder: str, *, as_json: bool) -> None:
    """List what is kept, the last used first."""
    path = _path(folder)
    if not path.exists():
        entries: list[Entry] = []
    else:
        with _opened(path) as opened:
            entries = opened.entries()
    if as_json:
        click.echo(json.dumps({"folder": str(path), "entries": list(map(_as_json, entries))}, indent=2))
        return
    if entries:
        print_table([_HEADINGS, *map(_row, entries)])
    total = human_bytes(sum(entry.num_bytes for entry in entries))
    click.echo(f"{path}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {total}")


@store.command()
@click.argument("keys", nargs=-1)
@_folder_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def verify(keys: Sequence[str], folder: str, *, as_json: bool) -> int:
    """Read entries (all without KEYS) and hold them against their hashes; what is damaged is removed.

    Exits with 1 when something was damaged.
    """
    found = {}
    with _opened(_path(folder)) as opened:
        for entry in _chosen(opened, keys, everything=not keys):
            if entry.is_whole:
                found[entry.name] = _verdict(opened, entry.name)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for name, verdict in found.items():
            click.echo(f"{name[:_SHORT_KEY]}  {verdict}")
    return EXIT_FAILURE if any(verdict.startswith("damaged") for verdict in found.values()) else 0


@store.command()
@click.argument("keys", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that no process has in use.")
@_folder_option
def evict(keys: Sequence[str], folder: str, *, everything: bool) -> int:
    """Remove entries. One that a process has in use stays, and the exit status is 1."""
    if bool(keys) == everything:
        raise click.UsageError("name the keys to evict, or --all")
    has_failed = False
    with _opened(_path(folder)) as opened:
        opened.sweep()
        for entry in _chosen(opened, keys, everything=everything):
            try:
                freed = opened.evict(entry.name)
            except EntryInUse as error:
                has_failed = True
                click.echo(f"{entry.name[:_SHORT_KEY]}  {error}", err=True)
            else:
                click.echo(f"{entry.name[:_SHORT_KEY]}  evicted, {human_bytes(freed)}")
    return EXIT_FAILURE if has_failed else 0


@contextmanager
def _opened(path: Path) -> Iterator[StoreFolder]:
    try:
        with StoreFolder(path, create=False) as folder:
            yield folder
    except (StoreRefused, StoreBusy) as error:
        raise CommandError(str(error)) from error


def _path(folder: str) -> Path:
    return default_folder() if folder in _NO_FOLDER else Path(folder).expanduser()


def _chosen(folder: StoreFolder, keys: Sequence[str], *, everything: bool) -> list[Entry]:
    """The entries whose names begin with the keys. Raises CommandError for one that fits none, or several."""
    entries = folder.entries()
    if everything:
        return [entry for entry in entries if entry.is_whole]
    chosen = []
    for key in keys:
        fitting = [entry for entry in entries if entry.is_whole and key and entry.name.startswith(key)]
        if len(fitting) != 1:
            raise CommandError(f"{key!r} is the key of {len(fitting)} entries; `stepwire store list` shows all keys")
        chosen += fitting
    return chosen


def _verdict(folder: StoreFolder, name: str) -> str:
    try:
        entry = map_entry(folder, name, num_threads=os.cpu_count() or 1, counts_as_use=False)
    except EntryDamaged as error:
        return f"damaged, removed: {error.message}"
    return "gone" if entry is None else "sound"


def _row(entry: Entry) -> tuple[str, ...]:
    if entry.header is None:
        known = ("(being written)" if not entry.is_whole else "(unreadable)", "-", "-", "-")
    else:
        key = entry.header.key
        known = (Path(entry.header.model).name, _rank(entry), key.dtype, key.quantisation)
    used = ago(time.time() - entry.last_used_s)
    pids = ", ".join(map(str, entry.pids)) or "-"
    return entry.name[:_SHORT_KEY], *known, human_bytes(entry.num_bytes), used, pids


def _rank(entry: Entry) -> str:
    if entry.header is None:
        return "-"
    place = entry.header.key.place
    tensor = f"tp {place.tensor_rank}/{place.tensor_parallel_size}"
    return f"{tensor} pp {place.pipeline_rank}/{place.pipeline_parallel_size}"


def _as_json(entry: Entry) -> dict[str, Any]:
    value: dict[str, Any] = {
        "key": entry.name,
        "bytes": entry.num_bytes,
        "last_used_s": round(entry.last_used_s, 3),
        "whole": entry.is_whole,
        "pids": list(entry.pids),
    }
    if entry.header is not None:
        header = entry.header
        value |= {"model": header.model, "created_s": header.created_s, "tensors": len(header.tensors)}
        value |= {"of": header.key.as_json()}
    return value
