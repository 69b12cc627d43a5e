"""What kustomize makes of the folders under deploy/kubernetes, of its features those that they use."""

from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]


def kustomization(folder: Path) -> Document:
    """A folder's kustomization.yaml."""
    loaded: Document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return loaded


def build(folder: Path) -> list[Document]:
    """All documents that a folder names, those of the folders that it includes too, as its patches leave them."""
    wanted, found = kustomization(folder), []
    for name in wanted["resources"]:
        path = (folder / name).resolve()
        found += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for entry in wanted.get("patches", []):
        found = _patched(found, yaml.safe_load((folder / entry["path"]).read_text()))
    return found


def generator(folder: Path) -> tuple[Path, Document]:
    """The one config map that a folder, or one that it includes, generates, and which folder that is."""
    wanted = kustomization(folder)
    if "configMapGenerator" in wanted:
        (only,) = wanted["configMapGenerator"]
        return folder, only
    included = [path for name in wanted["resources"] if (path := (folder / name).resolve()).is_dir()]
    return generator(included[0])


def _patched(documents: list[Document], patch: Document) -> list[Document]:
    """A strategic merge into the one document of the same kind and name, which goes if the patch deletes it."""
    (target,) = [document for document in documents if _identity(document) == _identity(patch)]
    if patch.pop("$patch", None) == "delete":
        return [document for document in documents if document is not target]
    return [_merged(document, patch) if document is target else document for document in documents]


def _identity(document: Document) -> tuple[str, str, str]:
    return document["apiVersion"], document["kind"], document["metadata"]["name"]


def _merged(old: Any, new: Any) -> Any:
    """Mappings key by key, lists of named entries name by name; anything else is replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old[key], value) if key in old else value for key, value in new.items()}}
    if isinstance(old, list) and all(isinstance(entry, dict) and "name" in entry for entry in (*old, *new)):
        known = {entry["name"]: entry for entry in old}
        first = [_merged(known.pop(entry["name"], {}), entry) for entry in new]
        return [*first, *known.values()]
    return new
