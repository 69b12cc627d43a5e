import re
import socket
from pathlib import Path

import pytest

from stepwire.rpc.server import AddressInUse, BindError
from stepwire.supervisor import ports
from stepwire.supervisor.ports import check_free, free_port, free_ports


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    check_free("127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


def test_ports_differ_and_are_none_that_the_system_gives_to_others() -> None:
    lowest = int(re.findall(r"\d+", Path("/proc/sys/net/ipv4/ip_local_port_range").read_text())[0])
    found = free_ports(50)
    assert len(set(found)) == 50
    assert max(found) < min(lowest, 32_768)


def test_without_one_of_ours_the_system_gives_any(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_CHOSEN_FROM", range(port, port + 1))
        monkeypatch.setattr(ports, "_TRIES", 1)
        assert free_port() != port


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} is in use .* --port"):
            check_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
def test_an_address_of_another_machine_is_named_with_a_remedy(host: str) -> None:
    with pytest.raises(BindError, match=f"cannot listen on {host}:1: .* --host"):
        check_free(host, 1)
