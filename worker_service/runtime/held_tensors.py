"""The tensors that an object holds, wherever they are in it."""

from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def replace_tensors(root: object, change: Change) -> None:
    """Puts `change(tensor)` in place of every tensor that `root` holds: in attributes, lists, dicts, tuples, the
    variables of functions within, and modules of torch. One that is held twice is changed once, and shared as before.
    """
    _Replacement(change).visit(root)


class _Replacement:
    """One walk. `_changed` keeps the tensors that were met, so that none of their ids is given out anew."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._changed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: dict[int, object] = {}

    def visit(self, value: Any) -> Any:
        """What is to stand in place of a value."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._seen or isinstance(value, type | str | bytes | int | float | torch.dtype | torch.device):
            return value
        if isinstance(value, tuple):
            return self._tuple(value)
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            value._apply(self._tensor)  # type: ignore[no-untyped-call]  # as its `to` does
        elif isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.visit(item)
        elif isinstance(value, list):
            value[:] = [self.visit(item) for item in value]
        elif hasattr(value, "__closure__"):
            for cell in value.__closure__ or ():
                cell.cell_contents = self.visit(cell.cell_contents)
        elif type(value).__module__.startswith(("worker_service.", "loader.")):
            self._attributes(value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._changed:
            self._changed[id(tensor)] = tensor, self._change(tensor)
        return self._changed[id(tensor)][1]

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.visit(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)

    def _attributes(self, value: object) -> None:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in [*getattr(value, "__dict__", ()), *slots]:
            old = getattr(value, name, None)
            new = self.visit(old)
            if new is not old:
                # Values are frozen; what they hold stays equal.
                object.__setattr__(value, name, new)
