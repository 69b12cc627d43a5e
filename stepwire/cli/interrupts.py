"""What Ctrl-C does to a stream of an answer."""

import contextlib
import signal
from collections.abc import Iterator

from stepwire.client import GenerateStream, StepwireError


@contextlib.contextmanager
def ctrl_c_closes(stream: GenerateStream) -> Iterator[None]:
    """Cancels the stream on Ctrl-C, and raises KeyboardInterrupt when it has ended for that reason.

    An interrupt raised inside gRPC's own waiting could leave its locks in a state that breaks the call.
    Where interrupts are ignored, as in a background job of a shell, they stay so.
    """
    is_cancelled = False

    def cancel(*_: object) -> None:
        nonlocal is_cancelled
        is_cancelled = True
        stream.close()

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, cancel)
    try:
        yield
    except StepwireError:
        if not is_cancelled:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if is_cancelled:
        raise KeyboardInterrupt
