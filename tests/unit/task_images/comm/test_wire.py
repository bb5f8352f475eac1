"""What trainers and parameter servers send each other: frames of every type, what is no frame, and who gets what."""

import json
import socket
import struct
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from task_images.comm import client
from task_images.comm.client import ServerClient, ServerSum, connect_servers
from task_images.comm.exchange import make_message
from task_images.comm.presets import resolve
from task_images.comm.wire import (
    DONE,
    DTYPES,
    PULL,
    SUM,
    TOKEN_BYTES,
    Frame,
    assign,
    receive_exactly,
    receive_frame,
    send_frame,
)
from task_images.contract import Contract
from task_images.harness.errors import PeerLostError


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    first, second = socket.socketpair()
    for end in (first, second):
        end.settimeout(20)
    with first, second:
        yield first, second


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket], dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 0, 3]).to(dtype)
    send_frame(pair[0], Frame(PULL, 2**32 - 1, -(2**62), tensor))
    send_frame(pair[0], Frame(SUM, 0, 7, torch.empty(0, dtype=dtype)))
    found, empty = receive_frame(pair[1]), receive_frame(pair[1])
    assert found[:3] == (PULL, 2**32 - 1, -(2**62))
    assert found.tensor.dtype is dtype
    assert torch.equal(found.tensor, tensor)
    assert (empty.clock, empty.tensor.numel(), empty.tensor.dtype) == (7, 0, dtype)


def test_a_header_has_kind_type_key_clock_and_size(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """In the network's order: a server of another version may read it."""
    send_frame(pair[0], Frame(PULL, 5, -2, torch.tensor([1.0], dtype=torch.float64)))
    raw = pair[1].recv(100)
    assert raw == struct.pack("!BBIqQ", 2, 3, 5, -2, 8) + struct.pack("=d", 1.0)


def test_a_column_with_gradients_is_sent_as_its_numbers(pair: tuple[socket.socket, socket.socket]) -> None:
    table = torch.arange(6.0).reshape(3, 2).requires_grad_()
    send_frame(pair[0], Frame(SUM, 0, 0, table[:, 1]))
    assert receive_frame(pair[1]).tensor.tolist() == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(("dtype", "size"), [(5, 4), (255, 0), (0, 2**34 + 1)])
def test_what_is_no_frame_is_not_read(pair: tuple[socket.socket, socket.socket], dtype: int, size: int) -> None:
    pair[0].sendall(struct.pack("!BBIqQ", SUM, dtype, 0, 0, size))
    with pytest.raises(ConnectionError, match="not a frame of this protocol"):
        receive_frame(pair[1])


def test_a_connection_that_ends_within_a_frame_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(struct.pack("!BBIqQ", SUM, 0, 0, 0, 8) + b"1234")
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="closed by peer"):
        receive_frame(pair[1])


def test_bytes_are_read_until_there_are_enough(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"abcde")
    assert receive_exactly(pair[1], 3) == b"abc"
    assert receive_exactly(pair[1], 0) == b""
    pair[0].close()
    with pytest.raises(ConnectionResetError):
        receive_exactly(pair[1], 3)


@pytest.mark.parametrize(
    ("sizes", "servers", "expected"),
    [
        ([5, 5, 5], 1, [0, 0, 0]),
        ([1, 9, 4, 4], 2, [1, 0, 1, 1]),  # 9 against 4 + 4 + 1
        ([5, 5, 5], 2, [0, 1, 0]),  # of equal ones the first
        ([1, 2, 3], 4, [2, 1, 0]),
        ([], 3, []),
        ([6, 3, 3, 2, 2, 2], 3, [0, 1, 2, 1, 2, 1]),
    ],
)
def test_parts_go_to_the_server_with_the_fewest_bytes(sizes: list[int], servers: int, expected: list[int]) -> None:
    assert assign(sizes, servers) == expected


# --- connections to servers -----------------------------------------------------------------------------------------


class Store(dict[str, bytes]):
    """The rendezvous, where servers have said where they listen."""

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            raise RuntimeError("wait timeout\n after 600 s")
        return self[key]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Two servers that listen."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    store = Store()
    for number, one in enumerate(listeners):
        one.settimeout(20)
        token = bytes([number]) * TOKEN_BYTES
        store[str(number)] = json.dumps([*one.getsockname()[:2], token.hex()]).encode()
    monkeypatch.setattr(client, "open_store", lambda contract: store)
    yield listeners
    for one in listeners:
        one.close()


def accept(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.settimeout(20)
    return connection


def test_a_trainer_proves_who_it_is_asks_each_server_and_says_that_it_is_done(servers: list[socket.socket]) -> None:
    trainer = ServerClient(Contract({"RANK": "258", "WORLD_SIZE": "300"}), 2, seconds=20)
    ends = [accept(one) for one in servers]
    for number, end in enumerate(ends):
        assert receive_exactly(end, TOKEN_BYTES + 4) == bytes([number]) * TOKEN_BYTES + b"\0\0\1\2"
    trainer.send(1, Frame(SUM, 4, 5, torch.ones(2)))
    assert receive_frame(ends[1]).key == 4
    assert not trainer.has_answer(1)
    send_frame(ends[1], Frame(SUM, 4, 5, torch.full((2,), 3.0)))
    assert trainer.receive(1).tensor.tolist() == [3.0, 3.0]
    ends[0].close()
    with pytest.raises(PeerLostError, match="lost parameter server 0: connection closed by peer") as error:
        trainer.receive(0)
    assert "See its log" in str(error.value.hint)
    trainer._connections.pop(0)
    trainer.close()
    assert receive_frame(ends[1]).kind == DONE
    ends[1].close()


def test_a_server_that_does_not_listen_is_named(servers: list[socket.socket]) -> None:
    servers[1].close()
    with pytest.raises(PeerLostError, match=r"parameter server 1 did not connect: .*refused"):
        ServerClient(Contract({}), 2, seconds=20)


def test_a_servers_place_that_never_comes_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "open_store", lambda contract: Store())
    with pytest.raises(PeerLostError, match="parameter server 0 did not connect: wait timeout after 600 s"):
        ServerClient(Contract({}), 1)


def test_the_connections_of_a_rank_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Fake(ServerClient):
        def __init__(self, contract: Any, servers: int) -> None:
            made.append((contract, servers))

    monkeypatch.setattr(client, "ServerClient", Fake)
    world: Any = SimpleNamespace(contract="contract", companions=["a pool of links"])
    first = connect_servers(world, 3)
    assert connect_servers(world, 3) is first
    assert made == [("contract", 3)]
    assert world.companions == ["a pool of links", first]


class Asked:
    """Servers that answer with twice of what they are asked, or as `answers` says."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, Frame]] = []
        self.answers: dict[int, deque[Any]] = {}

    def send(self, server: int, frame: Frame) -> None:
        self.frames.append((server, frame))
        self.answers.setdefault(server, deque()).append(frame._replace(tensor=frame.tensor * 2))

    def receive(self, server: int) -> Frame:
        found: Frame = self.answers[server].popleft()
        return found

    def has_answer(self, server: int) -> bool:
        return bool(self.answers.get(server))


@pytest.mark.parametrize(("codec", "size"), [("none", 4), ("fp16", 2)])
def test_a_message_goes_to_its_server_and_comes_back_as_the_sum(codec: str, size: int) -> None:
    booked: list[tuple[int, float]] = []
    link: Any = SimpleNamespace(book=lambda tensor, share: booked.append((tensor.nbytes, share)))
    method, asked = resolve("wfbp-ps", {"servers": "2", "codec": codec}), Asked()
    transport: Any = ServerSum(link, asked, method)  # type: ignore[arg-type]
    messages = [
        make_message(method, number, torch.full((count,), number + 1.0), 0, [count], [])
        for number, count in enumerate((2, 9, 3))
    ]
    transport.arrange(messages)
    under_way = [transport.start(message, 70 + message.number) for message in messages]
    assert [(server, *frame[:3]) for server, frame in asked.frames] == [
        (1, SUM, 0, 70),
        (0, SUM, 1, 71),
        (1, SUM, 2, 72),
    ]
    assert booked == [(2 * size, 1), (9 * size, 1), (3 * size, 1)]
    assert all(one.is_done() for one in under_way)
    for one in under_way:
        one.finish()
    assert [message.flat.tolist() for message in messages] == [[2.0] * 2, [4.0] * 9, [6.0] * 3]
    assert not any(one.is_done() for one in under_way)
