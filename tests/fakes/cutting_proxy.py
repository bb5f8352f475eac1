"""A TCP proxy between a client and a server that breaks its connections after a random number of bytes."""

import contextlib
import random
import socket
import socketserver
import threading
import time
from typing import Any


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    proxy: "CuttingProxy"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what this is for."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.greet()
        proxy = self.server.proxy
        self.left = None if proxy.most is None else proxy.chance.randint(proxy.least, proxy.most)
        with socket.create_connection(proxy.upstream) as upstream:
            threading.Thread(target=self._pump, args=(self.request, upstream), daemon=True).start()
            self._pump(upstream, self.request)

    def greet(self) -> None:
        """What is said before the connection is passed on."""

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        """Pass on what comes, until one side or the proxy ends the connection."""
        with contextlib.suppress(OSError):
            while self.left is None or self.left > 0:
                data = source.recv(1 << 16 if self.left is None else min(1 << 16, max(1, self.left)))
                if not data:
                    with contextlib.suppress(OSError):
                        target.shutdown(socket.SHUT_WR)
                    return
                time.sleep(self.server.proxy.pause)
                target.sendall(data)
                if self.left is not None:
                    self.left -= len(data)
        if self.left is not None and self.left <= 0:
            self.server.proxy.cuts += 1
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _SocksHandler(_Handler):
    def greet(self) -> None:
        """RFC 1928, without a login, for names alone."""
        version, count = self.request.recv(2)
        assert version == 5
        self.request.recv(count)
        self.request.sendall(b"\5\0")
        _, command, _, kind, length = self.request.recv(5)
        assert (command, kind) == (1, 3)
        name, port = self.request.recv(length).decode(), int.from_bytes(self.request.recv(2), "big")
        self.server.proxy.asked.append(f"{name}:{port}")
        self.request.sendall(b"\5\0\0\1" + bytes(6))


class CuttingProxy:
    """`with CuttingProxy(host, port) as proxy:` listens on 127.0.0.1:`proxy.port`.

    Each connection ends when between `least` and `most` bytes have gone through it; None: never.
    """

    handler = _Handler

    def __init__(self, host: str, port: int, *, least: int = 1, most: int | None = None, seed: int = 0) -> None:
        self.upstream = (host, port)
        self.least, self.most = least, most
        self.chance = random.Random(seed)
        self.cuts = 0
        self.asked: list[str] = []
        self.pause = 0.0  # seconds before each piece of 64 KiB
        self._server = _Server(("127.0.0.1", 0), self.handler)
        self._server.proxy = self

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> "CuttingProxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class SocksProxy(CuttingProxy):
    """A SOCKS5 proxy that knows one server, by whatever name; `asked` are the names."""

    handler = _SocksHandler
