"""Reads docker-compose.yml as compose does, without Docker."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def read_compose() -> dict[str, Any]:
    """The file, not interpolated."""
    compose: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return compose


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """What compose makes of ${NAME}, ${NAME:-default} and ${NAME:?message}. Raises KeyError with the message."""
    pattern = re.compile(r"\$\{(\w+)(?::([-?])((?:[^${}]|\$\{[^{}]*\})*))?\}")

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if environ.get(name):
            return environ[name]
        if kind == "?":
            raise KeyError(rest)
        return interpolate(rest or "", environ)

    return pattern.sub(value, text)
