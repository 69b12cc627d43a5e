"""The JSON Schema test suite, as schemas to answer with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "shared/data/json-schema-draft2020-12"


def suite_schemas(folder: Path = FOLDER) -> Iterator[tuple[str, Any]]:
    """The name and the schema of every group of tests."""
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text()):
            yield f"{path.relative_to(folder)}: {group['description']}", group["schema"]
