from pathlib import Path

import pytest

DEMO_MODEL = Path("~/.cache/stepwire/models/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo GGUF; tests that use it are skipped where `make setup` has not fetched it."""
    if not DEMO_MODEL.exists():
        pytest.skip(f"{DEMO_MODEL} is not there")
    return DEMO_MODEL
