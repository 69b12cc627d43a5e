"""The folders that an operator may have files loaded from."""

import posixpath
from collections.abc import Sequence

from scheduler_service.engine.validate import check_adapter_path
from stepwire.rpc.errors import StepwireError
from stepwire.rpc.exposure import is_loopback


class Roots:
    """The folders of the workers' hosts that operators may load from; none means anywhere, on loopback only.

    `setting` is the scheduler's that names them. Paths are compared as they are written: they are of other hosts. Where
    links lead is for the workers to look at, and their own roots.
    """

    def __init__(self, setting: str, roots: Sequence[str], host: str) -> None:
        self._setting = setting
        self._roots = [posixpath.normpath(root) for root in roots]
        self._is_exposed = not is_loopback(host)

    def check(self, path: str) -> str:
        """The path without "..". Raises FIELD_INVALID or FIELD_OUT_OF_RANGE for one that is not allowed."""
        check_adapter_path("path", path)
        plain = posixpath.normpath(path)
        if not self._roots and not self._is_exposed:
            return plain
        if any(plain.startswith(root.rstrip("/") + "/") for root in self._roots):
            return plain
        raise self._refusal(f"path {plain[:256]}", plain, "put it there")

    def check_unbounded(self, name: str) -> None:
        """Raises FIELD_INVALID where only what is below some folders may be loaded, for what is brought from elsewhere
        and lies in a cache."""
        if self._roots or self._is_exposed:
            raise self._refusal(f"{name[:256]}, which is no path,", name, "put it there and name its path")

    def _refusal(self, what: str, found: str, remedy: str) -> StepwireError:
        folders = self._setting.replace("_", " ")
        roots = ", ".join(self._roots) or "none: this server is reachable from other machines"
        remedy = f"{remedy}, or set {self._setting} of the scheduler"
        text = f"{what} is not below the scheduler's {folders} ({roots}); {remedy}"
        return StepwireError("FIELD_INVALID", text, {"field": "path", "found": found[:256], "remedy": remedy})
