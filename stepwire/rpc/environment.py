"""What gRPC reads from the environment when it is imported. Imports no gRPC."""

import os

_DEFAULTS = {
    # gRPC would warn of every process that is started; none of ours forks without starting another program.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    # Below that it writes lines of its own to standard error, such as one when a server goes away.
    "GRPC_VERBOSITY": "ERROR",
    # Its event engine hands every read and write to threads of its own. With the poller before it, a message
    # costs the client a third of the CPU time and the server a tenth less (docs/experiments.md).
    "GRPC_EXPERIMENTS": "-event_engine_listener,-event_engine_client",
    # That poller is whoever waits for a call. Calls that fail at once, for want of a connection, do not wait, so that
    # nobody but this clock sees the connection come about: every 5 s, unless it says otherwise.
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "200",
}


def prepare_grpc() -> None:
    """Sets what is not set yet. To be called by programs, never by the library, before gRPC is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
