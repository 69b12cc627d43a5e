"""`stepwire cache`."""

import json
import time
from collections.abc import Sequence

import click

from loader.sources.cache import Entry
from loader.sources.resolve import configured_cache
from stepwire.cli.checks.finding import human_bytes
from stepwire.cli.errors import EXIT_FAILURE, CommandError
from stepwire.cli.tables import ago, print_table

_HEADINGS = ("KEY", "MODEL", "BYTES", "LAST USED", "IN USE")
_SHORT_KEY = 12


@click.group()
def cache() -> None:
    """Show or evict models that were brought here from the Hub or a URL.

    STEPWIRE_CACHE names the folder, STEPWIRE_CACHE_BYTES how much it may hold.
    """


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_entries(*, as_json: bool) -> None:
    """List the models, the last used first."""
    found = configured_cache()
    entries = found.entries()
    if as_json:
        click.echo(json.dumps({"folder": str(found.folder), "entries": list(map(_as_json, entries))}, indent=2))
        return
    if entries:
        print_table([_HEADINGS, *map(_row, entries)])
    total = human_bytes(sum(entry.num_bytes for entry in entries))
    click.echo(f"{found.folder}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {total}")


@cache.command()
@click.argument("keys", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that no process has in use.")
def evict(keys: Sequence[str], *, everything: bool) -> int:
    """Remove models. One that a process has in use stays, and the exit status is 1."""
    if bool(keys) == everything:
        raise click.UsageError("name the keys to evict, or --all")
    found, has_failed = configured_cache(), False
    for entry in _chosen(found.entries(), keys, everything=everything):
        is_gone = found.evict(entry.key)
        has_failed |= not is_gone
        said = f"evicted, {human_bytes(entry.num_bytes)}" if is_gone else "is in use, and stays"
        click.echo(f"{entry.key[:_SHORT_KEY]}  {said}", err=not is_gone)
    return EXIT_FAILURE if has_failed else 0


def _chosen(entries: Sequence[Entry], keys: Sequence[str], *, everything: bool) -> list[Entry]:
    """The entries whose keys begin as given, or whose URLs are given. Raises CommandError for one that fits none."""
    if everything:
        return list(entries)
    chosen: list[Entry] = []
    for key in keys:
        fitting = [entry for entry in entries if entry.url == key or (key and entry.key.startswith(key))]
        if not fitting or (len(fitting) > 1 and fitting[0].url != key):
            raise CommandError(f"{key!r} is the key of {len(fitting)} models; `stepwire cache list` shows all keys")
        chosen += [entry for entry in fitting if entry not in chosen]
    return chosen


def _row(entry: Entry) -> tuple[str, ...]:
    used = ago(time.time() - entry.last_used)
    return entry.key[:_SHORT_KEY], entry.url, human_bytes(entry.num_bytes), used, "yes" if entry.in_use else "no"


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "key": entry.key,
        "url": entry.url,
        "path": str(entry.path),
        "bytes": entry.num_bytes,
        "last_used_s": round(entry.last_used, 3),
        "in_use": entry.in_use,
    }
