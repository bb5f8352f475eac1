"""Network interfaces of a machine, and which of them ranks should use. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
IPV6_ADDRESSES = "/proc/net/if_inet6"  # address, index, length of the prefix, scope, flags and interface, in hex
_GLOBAL, _HOST = "00", "10"  # scopes; addresses of a link alone would need its name
_UNUSABLE = 0x20 | 0x08 | 0x40  # deprecated, found twice, or not yet known to be unique


def interface_addresses() -> list[tuple[str, str, str]]:
    """Name, address and mask of each interface that has one; those of IPv6, with the length of their prefix, last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                address = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(probe.fileno(), SIOCGIFNETMASK, request)[20:24]
                found.append((name, socket.inet_ntoa(address), socket.inet_ntoa(mask)))
    with contextlib.suppress(OSError), open(IPV6_ADDRESSES, encoding="ascii") as file:
        for packed, _, length, scope, flags, name in map(str.split, file):
            if scope in (_GLOBAL, _HOST) and not int(flags, 16) & _UNUSABLE:
                own = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
                found.append((name, own, str(int(length, 16))))
    return found


def list_addresses(interface: str | None) -> list[str]:
    """Addresses of this machine, best first: that of its name, those of its interfaces, the loopback last."""
    own = [(name, address) for name, address, _ in interface_addresses()]
    if interface:
        return [address for name, address in own if name == interface]
    addresses = [address for name, address in own if not name.startswith(("docker", "br-", "veth", "virbr"))]
    with contextlib.suppress(OSError):
        addresses.insert(0, socket.gethostbyname(socket.gethostname()))
    return sorted(dict.fromkeys(addresses), key=lambda address: ipaddress.ip_address(address).is_loopback)


def find_interface(address: str) -> str | None:
    """The interface that has this address, else the one whose network it is in."""
    wanted, own = ipaddress.ip_address(address), interface_addresses()
    names = [name for name, known, _ in own if ipaddress.ip_address(known) == wanted]
    names += [name for name, known, mask in own if wanted in ipaddress.ip_network(f"{known}/{mask}", strict=False)]
    return next(iter(names), None)


def listen(port: int = 0, backlog: int = 4096) -> socket.socket:
    """A socket that takes connections on all interfaces: of IPv6, too, because clusters may have nothing else."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)
