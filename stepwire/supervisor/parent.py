"""In a child: end when the supervisor does, however it ends."""

import ctypes
import os
import signal
import sys
import threading

# Set by the supervisor to its own process id; the child's standard input is then a pipe from it.
SUPERVISOR_VARIABLE = "STEPWIRE_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


def end_with_supervisor() -> None:
    """Makes this process die with the supervisor that started it; does nothing in any other process."""
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if supervisor is None:
        return
    if sys.platform == "linux":
        # Also kills a process that is stuck in native code.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(supervisor):
        os._exit(1)
    threading.Thread(target=_exit_at_end_of_input, name="supervisor-watch", daemon=True).start()


def _exit_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
