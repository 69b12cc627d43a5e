"""`stepwire admin`: its commands, each kind of operation in a module beside this one."""

import click

from stepwire.cli.admin.adapters import adapters, load_adapter, unload_adapter
from stepwire.cli.admin.flight import flight
from stepwire.cli.admin.models import load_model, unload_model
from stepwire.cli.admin.replicas import add_replica, drain_replica
from stepwire.cli.admin.sleep import sleep, wake
from stepwire.cli.admin.state import state


@click.group()
def admin() -> None:
    """Operate a server that was started with an admin key (--admin-key, STEPWIRE_ADMIN_KEY)."""


for command in (state, load_model, unload_model, flight, adapters, load_adapter, unload_adapter, sleep, wake):
    admin.add_command(command)
admin.add_command(add_replica)
admin.add_command(drain_replica)
