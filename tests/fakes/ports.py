"""A port for a program that a test starts later."""

import socket


def reserve_port() -> tuple[socket.socket, int]:
    """A socket that keeps a port of this machine for as long as it is open, and the port.

    Nobody else gets the port meanwhile, and no connection to it can meet itself, as one may if the port is among those
    for outgoing connections. A program that allows addresses to be used again, as servers do, can listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held, held.getsockname()[1]
