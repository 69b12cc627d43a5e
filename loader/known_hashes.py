"""Which SHA-256 a file ought to have, told by what lies beside it; reads no content. Imports no torch."""

import re
from collections.abc import Mapping
from pathlib import Path

from loader.errors import CheckpointError
from loader.files import parse_json_object, read_small

MANIFEST_NAME = "stepwire.json"
"""Lies beside the files of a sliced checkpoint and names their hashes."""
RECORD_NAME = "entry.json"
"""Lies above the files of an entry of the cache, and names their hashes."""
_SUMS_NAMES = ("SHA256SUMS", "sha256sums.txt", "SHA256SUMS.txt")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# As sha256sum writes it; a backslash before the sum would say that the name is escaped.
_SUM_LINE = re.compile(r"(?P<sha256>[0-9a-fA-F]{64})(?: [ *](?P<name>(?:\./)?[^\\/\0]+))?")
_MAX_SUMS_BYTES = 4 << 20


class KnownHashes:
    """Looks hashes up, reading the lists of a folder once.

    In this order: the name of the file in the cache of the Hugging Face Hub, which is its content's SHA-256; our
    manifest or record; SHA256SUMS; NAME.sha256. A list that cannot be read counts as none.
    """

    def __init__(self) -> None:
        self._folders: dict[Path, Mapping[str, str]] = {}

    def of(self, path: Path) -> str | None:
        """The SHA-256 in hexadecimal; None where nothing tells it."""
        blob = _blob_name(path)
        if blob is not None:
            return blob
        folder = path.parent
        if folder not in self._folders:
            self._folders[folder] = _listed(folder)
        listed = self._folders[folder].get(path.name)
        return listed or _sums(path.with_name(f"{path.name}.sha256"), path.name).get(path.name)


def _blob_name(path: Path) -> str | None:
    target = path.resolve() if path.is_symlink() else path
    return target.name if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) else None


def _listed(folder: Path) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in _SUMS_NAMES:
        found.update(_sums(folder / name, None))
    for listing in (folder.parent / RECORD_NAME, folder / MANIFEST_NAME):
        found.update(_manifest(listing))
    return found


def _sums(path: Path, only: str | None) -> Mapping[str, str]:
    """The lines of a file such as sha256sum writes; one without a name is about `only`."""
    if not path.is_file():
        return {}
    try:
        lines = read_small(path, _MAX_SUMS_BYTES).decode("utf-8", "replace").splitlines()
    except CheckpointError:
        return {}
    matches = filter(None, (_SUM_LINE.fullmatch(line.strip()) for line in lines))
    named = ((match["name"] or only, match["sha256"].lower()) for match in matches)
    return {name.removeprefix("./"): sha256 for name, sha256 in named if name}


def _manifest(path: Path) -> Mapping[str, str]:
    if not path.is_file():
        return {}
    try:
        files = parse_json_object(path, read_small(path)).get("files")
    except CheckpointError:
        return {}
    if not isinstance(files, dict):
        return {}
    sums = {name: facts.get("sha256") for name, facts in files.items() if isinstance(facts, dict)}
    return {name: sha256 for name, sha256 in sums.items() if isinstance(sha256, str) and _SHA256.fullmatch(sha256)}
