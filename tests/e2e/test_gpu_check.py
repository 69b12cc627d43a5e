"""`make gpu-check` where there is no CUDA device."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/gpu_check.py"


def test_the_dry_run_compares_and_measures() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tokens equal the CPU's" in done.stdout
    assert done.stdout.count("of the measured bandwidth") == 2
