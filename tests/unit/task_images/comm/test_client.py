"""A trainer's connection to a server: answers are taken in as they come, and a server that is gone is said so."""

import socket
from collections.abc import Iterator

import pytest
import torch

from task_images.comm.client import Connection
from task_images.comm.wire import SUM, Frame, send_frame


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """What a server listens with."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield found


def connect(listener: socket.socket, seconds: float = 60) -> tuple[Connection, socket.socket]:
    connection = Connection(socket.create_connection(listener.getsockname()), seconds)
    accepted, _ = listener.accept()
    accepted.settimeout(60)
    return connection, accepted


def test_answers_are_taken_in_while_nobody_asks_for_them(listener: socket.socket) -> None:
    connection, accepted = connect(listener)
    with accepted:
        for update in range(8):  # 64 MiB, more than sockets hold
            send_frame(accepted, Frame(SUM, 0, update, torch.full((2 << 20,), float(update))))
        answers = [connection.receive() for _ in range(8)]
        connection.close()
    assert [(answer.clock, float(answer.tensor[-1])) for answer in answers] == [(n, float(n)) for n in range(8)]


def test_a_server_that_is_gone_or_silent_is_said_so(listener: socket.socket) -> None:
    connection, accepted = connect(listener, seconds=0.2)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        connection.receive()
    accepted.close()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="closed by peer"):
            connection.receive()
    connection.close()
