"""In a child: end when the supervisor does, however it ends."""

import ctypes
import os
import signal
import socket
import sys

from stepwire.supervisor.line import SupervisorLine

# Set by the supervisor to its own process id; the child's standard input is then a socket to it.
SUPERVISOR_VARIABLE = "STEPWIRE_SUPERVISOR_PID"
# Set for a process that makes everything ready and then waits to be wanted.
STANDBY_VARIABLE = "STEPWIRE_STANDBY"
_PR_SET_PDEATHSIG = 1


def end_with_supervisor() -> SupervisorLine | None:
    """Makes this process die with the supervisor that started it, and answers the line to it.

    Does nothing, and answers None, in any other process.
    """
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if supervisor is None:
        return None
    if sys.platform == "linux":
        # Also kills a process that is stuck in native code.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(supervisor):
        os._exit(1)
    return SupervisorLine(socket.socket(fileno=os.dup(0)))


def is_standby() -> bool:
    """Whether this process is to wait for the supervisor's word once it is ready to begin. Answers True once."""
    return os.environ.pop(STANDBY_VARIABLE, None) is not None
