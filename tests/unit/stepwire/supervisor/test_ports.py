import socket

import pytest

from stepwire.rpc.server import AddressInUse, BindError
from stepwire.supervisor.ports import check_free, free_port


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    check_free("127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} is in use .* --port"):
            check_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
def test_an_address_of_another_machine_is_named_with_a_remedy(host: str) -> None:
    with pytest.raises(BindError, match=f"cannot listen on {host}:1: .* --host"):
        check_free(host, 1)
