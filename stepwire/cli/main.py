"""The `stepwire` command. Commands are imported when they are used, so that help is quick."""

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

from stepwire.cli.errors import EXIT_FAILURE, EXIT_INTERRUPTED, explain
from stepwire.rpc.environment import prepare_grpc

# Command: (module, attribute, help in one line).
_COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "serve": ("services", "serve", "Serve a model: scheduler and worker on this machine."),
    "scheduler": ("services", "scheduler", "Run a scheduler; workers run elsewhere."),
    "worker": ("services", "worker", "Run a worker: one process, one device."),
    "generate": ("generate", "generate", "Continue a prompt, streaming the answer."),
    "chat": ("chat", "chat", "Talk with a model."),
    "models": ("models", "models", "List the models that a server serves."),
    "health": ("health", "health", "Ask a server whether it serves."),
    "config": ("config", "config", "Show the settings in force and where each one came from."),
    "check": ("check", "check", "Tell whether a checkpoint can be served, and what it needs."),
    "slice": ("slice", "slice_", "Slice a checkpoint ahead for the ranks of one split."),
    "cache": ("cache", "cache", "Show or evict models that were brought here from elsewhere."),
    "store": ("store", "store", "Show, verify or evict weights that are kept for restarts."),
    "doctor": ("doctor", "doctor", "Check this machine, in the order people debug one."),
    "simulate": ("simulate", "simulate", "Run the scheduler in virtual time: this model, hardware and traffic."),
    "bench": ("bench", "bench", "Load a running server and report throughput and times."),
    "top": ("top", "top", "Watch a server: queue, batch, blocks, tokens a second, workers."),
    "profile": (
        "profile",
        "profile_command",
        "Profile a server's next steps: a timeline, and time by layer and operator.",
    ),
    "admin": ("admin.group", "admin", "Operate a server that has an admin key."),
    "replay": ("replay", "replay", "Run recorded steps on a worker again, and compare."),
    "traces": ("traces", "traces", "Receive traces and show them."),
}
_EPILOG = "Exit status: 0 done; 1 failed; 2 wrong usage or settings; 130 interrupted."


class _LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"stepwire.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stepwire", message="%(prog)s %(version)s")
def cli() -> None:
    """LLM inference as gRPC microservices: a scheduler, workers, and a typed step protocol between them."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns the exit status. Expected failures become one message on standard error."""
    prepare_grpc()
    try:
        result = cli.main(list(arguments), prog_name="stepwire", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; nothing can be said to it, not even at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        text = explain(error)
        if text is None:
            raise
        click.echo(f"Error: {text}", err=True)
        return EXIT_FAILURE


def main() -> None:
    """Entry point."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
