"""Models by Hub id: what the Hub has, and what its own cache on this machine holds. Imports huggingface_hub when used.

Of huggingface_hub the listing, the token and its cache are used, and neither its downloads nor their locks: a lock of
a process that died keeps them waiting for ever on some file systems.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from loader.errors import CheckpointError
from loader.files import read_json_object
from loader.sources.http import HttpReader
from loader.sources.remote import (
    RemoteFile,
    RemoteModel,
    choose_files,
    gguf_names,
    is_safe_name,
    read_small_remote,
    sha256_or_none,
)

TIMEOUT_S = 30.0
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?P<file>/[A-Za-z0-9._/-]{{1,200}}\.gguf)?(@(?P<revision>[\w./-]{{1,200}}))?"
)
_NEEDED, _NEEDED_SUFFIXES = ("config.json", "tokenizer.json"), (".safetensors", ".gguf")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the Hub: `org/name`, at a branch, tag or commit; or one GGUF file of it."""

    repo: str
    revision: str = "main"
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> "HubId | None":
        """Reads `org/name[/FILE.gguf][@revision]`; None for anything else."""
        match = _ID.fullmatch(text)
        if match is None or ".." in text or "--" in match["repo"]:
            return None
        return cls(match["repo"], match["revision"] or "main", match["file"][1:] if match["file"] else None)

    @property
    def is_fixed(self) -> bool:
        """Whether it names one commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    def url(self, revision: str) -> str:
        """As a URL, which is how the cache knows it."""
        return f"hf://{self.repo}@{revision}" + (f"/{self.file}" if self.file else "")

    @property
    def short_name(self) -> str:
        """A name for people: that of the GGUF file, or the part behind the slash."""
        return (self.file or self.repo).rpartition("/")[2].removesuffix(".gguf")

    def __str__(self) -> str:
        return f"{self.repo}{'/' + self.file if self.file else ''}@{self.revision}"


def hub_model(wanted: HubId) -> tuple[RemoteModel, str]:
    """Asks the Hub what the model consists of; with it comes the commit that its revision stands for.

    Raises CheckpointError: "unavailable" without a network, "not_found" for what the Hub does not have, or not show.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        info = HfApi(endpoint=endpoint).model_info(
            wanted.repo, revision=wanted.revision, files_metadata=True, timeout=TIMEOUT_S
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        text = f"the Hub has no model {wanted}, or does not show it to you"
        raise CheckpointError(
            "not_found", text, "check the name, or set HF_TOKEN for one with restricted access"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise _unreachable(wanted, error) from error
    except Exception as error:
        # The client passes errors of whatever HTTP library it uses.
        if not type(error).__module__.startswith(("http", "requests")):
            raise
        raise _unreachable(wanted, error) from error
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise CheckpointError("invalid", f"the Hub names no commit of {wanted}", "check HF_ENDPOINT")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    reader = HttpReader(f"{endpoint}/{wanted.repo}/resolve/{quote(commit)}", headers)
    found = {}
    for sibling in info.siblings or []:
        if sibling.size is not None:
            sha256 = sha256_or_none(sibling.lfs.sha256) if sibling.lfs else None
            found[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size, "", sha256)
    url = wanted.url(commit)
    return RemoteModel(url, wanted.repo.rpartition("/")[2], _choose(wanted, found, reader), reader), commit


def _choose(wanted: HubId, found: dict[str, RemoteFile], reader: HttpReader) -> list[RemoteFile]:
    if wanted.file is not None:
        names = gguf_names(wanted.file)
        missing = [name for name in names if name not in found or not is_safe_name(name)]
        if missing:
            raise CheckpointError("not_found", f"{wanted.repo} has no file {missing[0]}", "check the name")
        return [found[name] for name in names]

    def find(name: str) -> RemoteFile:
        if name not in found:
            raise CheckpointError("not_found", f"{wanted} lacks {name}, which its index names", "tell its publisher")
        return found[name]

    try:
        return choose_files(wanted.repo, found, lambda file: read_small_remote(reader, file), find=find)
    except OSError as error:
        raise _unreachable(wanted, error) from error


def hub_snapshot(wanted: HubId, revision: str, files: Sequence[RemoteFile] | None = None) -> Path | None:
    """The model as huggingface_hub's cache on this machine holds it, if it is there whole; never waits for a lock.

    `files` are those of the model: it must have the weights, config and tokenizer among them, in their sizes. Where
    they are not known, its index tells. Returns a folder, or the GGUF file that `wanted` names.
    """
    from huggingface_hub import try_to_load_from_cache

    ggufs = gguf_names(wanted.file) if wanted.file else []
    for name in ggufs[:1] or ("config.json", "model.safetensors.index.json", "model.safetensors"):
        found = try_to_load_from_cache(wanted.repo, name, revision=revision)
        if isinstance(found, str):
            break
    else:
        return None
    if wanted.file:
        return Path(found) if all(Path(found).with_name(Path(name).name).exists() for name in ggufs) else None
    folder = Path(found).parent
    if files is not None:
        needed = (file for file in files if file.name in _NEEDED or file.name.endswith(_NEEDED_SUFFIXES))
        whole = all(_has_size(folder / file.name, file.num_bytes) for file in needed)
    else:
        whole = _looks_whole(folder)
    return folder if whole else None


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except OSError:
        return False


def _looks_whole(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        return isinstance(weight_map, dict) and all((folder / str(name)).exists() for name in weight_map.values())
    return (folder / "model.safetensors").exists() or any(folder.glob("*.gguf"))


def _unreachable(wanted: HubId, error: Exception) -> CheckpointError:
    reason = (str(error) or type(error).__name__).splitlines()[0][:300]
    return CheckpointError(
        "unavailable",
        f"the Hub cannot be asked for {wanted}: {reason}",
        "check the network and HF_ENDPOINT, or download the model and pass its folder",
    )
