"""Network interfaces of a machine, and which of them ranks should use. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B


def interface_addresses() -> list[tuple[str, str, str]]:
    """Name, IPv4 address and mask of each interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                address = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(probe.fileno(), SIOCGIFNETMASK, request)[20:24]
                found.append((name, socket.inet_ntoa(address), socket.inet_ntoa(mask)))
    return found


def list_addresses(interface: str | None) -> list[str]:
    """Addresses of this machine, best first: that of its name, those of its interfaces, the loopback last."""
    own = [(name, address) for name, address, _ in interface_addresses()]
    if interface:
        return [address for name, address in own if name == interface]
    addresses = [address for name, address in own if not name.startswith(("docker", "br-", "veth", "virbr"))]
    with contextlib.suppress(OSError):
        addresses.insert(0, socket.gethostbyname(socket.gethostname()))
    return sorted(dict.fromkeys(addresses), key=lambda address: address.startswith("127."))


def find_interface(address: str) -> str | None:
    """The interface that has this address, else the one whose network it is in."""
    own = interface_addresses()
    for name, known, _ in own:
        if known == address:
            return name
    wanted = int.from_bytes(socket.inet_aton(address), "big")
    for name, known, mask in own:
        bits = int.from_bytes(socket.inet_aton(mask), "big")
        if wanted & bits == int.from_bytes(socket.inet_aton(known), "big") & bits:
            return name
    return None
