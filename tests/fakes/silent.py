"""A server that takes connections and never says a word, as a firewall that swallows answers."""

import contextlib
import socket
import threading


class Silent:
    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._held)

    def close(self) -> None:
        # Wakes the thread up: the kernel may start its accept() again, on whatever has the descriptor's number by then.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._held:
            connection.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._held.append(self._socket.accept()[0])
