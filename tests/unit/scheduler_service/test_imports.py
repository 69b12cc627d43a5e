"""What the scheduler process brings into memory."""

import subprocess
import sys


def test_the_scheduler_never_imports_torch() -> None:
    program = (
        "import sys, scheduler_service.main\n"
        "heavy = {'torch', 'transformers', 'worker_service'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
