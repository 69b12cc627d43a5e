"""`make gpu-check` where there is no CUDA device."""

import json
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
    summary = json.loads(done.stdout.splitlines()[-1])
    checks = summary["checks"]
    products = {"products", "quantised_models"}
    assert checks.keys() == {"kernels", "tokens", "rounded_caches", "graphs", "attention_speed", "speed"} | products
    assert summary["ok"] and all(check["ok"] and check["found"] for check in checks.values())
