"""Network namespaces by system calls and `ip -batch`: made, entered, configured. Linux only.

Nothing has to be removed: the kernel drops a namespace, with its links, when the last process and descriptor are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence

NEW_USER = 0x10000000
NEW_NETWORK = 0x40000000
_SIOCETHTOOL = 0x8946
_SET_TX_CHECKSUM, _SET_TSO, _SET_GSO = 0x17, 0x1F, 0x24
_TOOL_FOLDERS = "/usr/sbin:/sbin:/usr/bin:/bin"


class ShapingError(Exception):
    """Why the network could not be shaped, as a sentence without its end."""


def unshare(flags: int, what: str) -> None:
    """Move this process into new namespaces. Raises ShapingError."""
    if _libc().unshare(flags):
        raise ShapingError(f"{what} cannot be created: {os.strerror(ctypes.get_errno())}")


def enter(descriptor: int, kind: int) -> None:
    """Move this process, which must have one thread, into the namespace of an open descriptor. Raises OSError."""
    if _libc().setns(descriptor, kind):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def become_root_of_user_namespace() -> None:
    """Make a user namespace, in which this process may configure networks. Raises ShapingError with the reason."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER, "a user namespace, which an ordinary user needs for it,")
    try:
        _write_identities(0, user, 0, group)
    except OSError as error:
        raise ShapingError(f"the system does not let an ordinary user create networks: {error.strerror}") from None


def become_user_again(user: int, group: int) -> None:
    """From inside a user namespace that maps `user` to root: be that user again, without rights over the network."""
    if _libc().unshare(NEW_USER):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    _write_identities(user, 0, group, 0)


def _write_identities(inside_user: int, user: int, inside_group: int, group: int) -> None:
    with contextlib.suppress(OSError), open("/proc/self/setgroups", "w", encoding="ascii") as file:
        file.write("deny")
    for name, line in (("uid_map", f"{inside_user} {user} 1"), ("gid_map", f"{inside_group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)


def open_network() -> int:
    """A descriptor of this process's network namespace; it keeps the namespace alive."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def open_user() -> int:
    """A descriptor of this process's user namespace."""
    return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def new_network() -> int:
    """Move this process into a new, empty network namespace; its descriptor."""
    unshare(NEW_NETWORK, "a network namespace")
    return open_network()


def find_tool(name: str) -> str:
    """The path of a tool of iproute2. Raises ShapingError."""
    path = shutil.which(name) or shutil.which(name, path=_TOOL_FOLDERS)
    if path is None:
        raise ShapingError(f'the command "{name}" is missing (package iproute2)')
    return path


def configure(lines: Sequence[str], tool: str = "ip", descriptors: Sequence[int] = ()) -> None:
    """Hand lines to `ip -batch` or `tc -batch` in this process's network namespace. Raises ShapingError.

    The tool inherits `descriptors`, so that a line may name them as /proc/self/fd/N.
    """
    words = [find_tool(tool), "-batch", "-"]
    done = subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True, pass_fds=descriptors)
    if done.returncode:
        reason = " ".join(done.stderr.split())[:200]
        raise ShapingError(f"{tool} refuses to configure the network: {reason}")


def disable_offloads(interface: str) -> None:
    """Have the kernel compute checksums and cut segments itself: packets leave it by a raw socket. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for command in (_SET_TSO, _SET_GSO, _SET_TX_CHECKSUM):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sQ", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, request + bytes(16))


def set_sysctl(name: str, value: str) -> str | None:
    """Set one of net.ipv4 in this process's network namespace; the value that it then has, None if unknown."""
    path = f"/proc/sys/net/ipv4/{name}"
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(value)
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
        return " ".join(file.read().split())
    return None


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
