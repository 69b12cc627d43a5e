"""Where a worker may load models from."""

from collections.abc import Sequence
from pathlib import Path

from stepwire.rpc.errors import StepwireError

MAX_PATH_LEN = 4096


class ModelRoots:
    """The folders that models may be loaded from; none means anywhere.

    A worker loads from paths of its own machine alone. Hub ids and URLs are for the commands that start a scheduler:
    they bring the model here and name its path, so a worker needs no network, and stays within its roots.

    Symbolic links are followed before a path is compared, in the path and in a checkpoint folder's
    own entries, so a link does not lead out of the roots.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root).expanduser().resolve() for root in roots]

    def resolve(self, model_path: str, field: str = "model_path") -> Path:
        """The path that `field` names, as it may be opened. Reads folder entries, so not for the event loop.

        Raises StepwireError FIELD_INVALID for a URL, for one that is no path, and for one that leads out of the roots.
        Whether something exists outside of them does not show in the answer.
        """
        if not model_path or len(model_path) > MAX_PATH_LEN or "\0" in model_path:
            raise _refused(field, f"must be a path of 1..{MAX_PATH_LEN} characters", {})
        if "://" in model_path:
            remedy = "name it to the scheduler, which brings it to a path that this worker can read"
            raise _refused(field, f"a URL is no path of this machine; {remedy}", {"remedy": remedy})
        path = Path(model_path).expanduser()
        if not self._roots:
            return path
        resolved = path.resolve()
        if not self._is_inside(resolved):
            raise self._outside(field, model_path)
        if resolved.is_dir():
            for entry in resolved.iterdir():
                if entry.is_symlink() and not self._is_inside(entry.resolve()):
                    raise self._outside(field, str(entry))
        return resolved

    def _is_inside(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)

    def _outside(self, field: str, path: str) -> StepwireError:
        roots = ", ".join(map(str, self._roots))
        remedy = "put it there, or set model_roots of this worker"
        return _refused(
            field,
            f"{path} is not below this worker's model roots ({roots}); {remedy}",
            {"file": path, "remedy": remedy},
        )


def _refused(field: str, problem: str, metadata: dict[str, str]) -> StepwireError:
    return StepwireError("FIELD_INVALID", f"{field}: {problem}", {"field": field, **metadata})
