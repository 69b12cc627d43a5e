"""Who can reach a service by the address that it listens on."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
