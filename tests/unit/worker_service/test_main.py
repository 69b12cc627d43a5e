"""The worker's start does not wait for torch."""

import subprocess
import sys


def test_importing_the_service_does_not_import_torch() -> None:
    program = "import sys, worker_service.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
