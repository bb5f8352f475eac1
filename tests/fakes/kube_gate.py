"""A TLS door before a real Kubernetes API: it asks for a cloud's token and has a certificate of the cloud's CA.

Behind it the connection goes on to the real server with that server's own client certificate, byte for byte, so that
watches, followed logs and websockets are what they are. The token is asked for at the start of each connection.
"""

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Credential, PrivateFile

REFUSAL = b'{"kind":"Status","message":"Unauthorized","reason":"Unauthorized"}'
MOST_HEAD = 1 << 16


class KubeGate:
    """`allowed` judges the value of Authorization. `pem` holds the door's certificate and key."""

    def __init__(self, upstream: Access, pem: Path, allowed: Callable[[str], bool]) -> None:
        parts = urlsplit(upstream.server)
        self._upstream = (parts.hostname or "", parts.port or 443)
        self._outward = ssl.create_default_context(cadata=upstream.ca.decode() if upstream.ca else None)
        if pair := Credential(certificate=upstream.certificate, key=upstream.key).pem:
            file = PrivateFile(pair)
            self._outward.load_cert_chain(file.path)
        self._inward = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._inward.load_cert_chain(pem)
        self._allowed = allowed
        self.refused = 0
        self.passed = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain, self._inward.wrap_socket(plain, server_side=True) as client:
            head = b""
            while b"\r\n\r\n" not in head and len(head) < MOST_HEAD:
                chunk = client.recv(MOST_HEAD)
                if not chunk:
                    return
                head += chunk
            if not self._allowed(_authorization(head)):
                self.refused += 1
                client.sendall(
                    b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(REFUSAL)
                )
                client.sendall(REFUSAL)
                return
            self.passed += 1
            with (
                socket.create_connection(self._upstream) as raw,
                self._outward.wrap_socket(raw, server_hostname=self._upstream[0]) as server,
            ):
                server.sendall(head)
                _splice(client, server)


def _authorization(head: bytes) -> str:
    for line in head.split(b"\r\n\r\n")[0].split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"authorization":
            return value.strip().decode("latin-1")
    return ""


def _splice(one: ssl.SSLSocket, other: ssl.SSLSocket) -> None:
    """Carry bytes both ways until either side ends."""
    ways = {one: other, other: one}
    while True:
        waiting = [side for side in ways if side.pending()] or select.select(list(ways), [], [])[0]
        for side in waiting:
            data = side.recv(1 << 16)
            if not data:
                return
            ways[side].sendall(data)
