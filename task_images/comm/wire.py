"""The protocol of trainers and parameter servers over TCP: a fixed header, then the bytes of a tensor."""

import selectors
import socket
import struct
from typing import NamedTuple

import torch
from torch import Tensor

SUM, PUSH, PULL, SET, DONE, TURN = range(6)  # kinds of frames
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8)
_HEADER = struct.Struct("!BBIqQ")
TOKEN_BYTES = 16
MAX_BYTES = 2**34


class Frame(NamedTuple):
    """One request or answer.

    key      number of the message, or part of the model
    clock    SUM: the update; PUSH: the trainer's number of updates. In an answer: by how many updates this trainer was
             ahead of the slowest
    """

    kind: int
    key: int
    clock: int
    tensor: Tensor


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Send a frame. Raises OSError."""
    flat = frame.tensor.detach().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    connection.sendall(_HEADER.pack(frame.kind, DTYPES.index(flat.dtype), frame.key, frame.clock, size))
    if size:
        connection.sendall(flat.view(torch.uint8).numpy().data)


def receive_frame(connection: socket.socket) -> Frame:
    """The next frame. Raises OSError, also if the other end is gone or sends an invalid frame."""
    header = bytearray(_HEADER.size)
    _receive_into(connection, memoryview(header))
    kind, dtype, key, clock, size = _HEADER.unpack(header)
    if dtype >= len(DTYPES) or size > MAX_BYTES:
        raise ConnectionError("what arrived is not a frame of this protocol")
    raw = torch.empty(size, dtype=torch.uint8)
    _receive_into(connection, memoryview(raw.numpy()))  # type: ignore[arg-type]
    return Frame(kind, key, clock, raw.view(DTYPES[dtype]))


def await_bytes(connection: socket.socket) -> None:
    """Wait until the other end has sent something or disconnected. Raises OSError."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.select()


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raises OSError if the other end disconnects before."""
    raw = bytearray(count)
    _receive_into(connection, memoryview(raw))
    return bytes(raw)


def _receive_into(connection: socket.socket, place: memoryview) -> None:
    while len(place):
        count = connection.recv_into(place)
        if not count:
            raise ConnectionResetError("connection closed by peer")
        place = place[count:]


def assign(sizes: list[int], servers: int) -> list[int]:
    """The server of each part of `sizes` bytes: largest first, each to the server with the fewest bytes so far."""
    load = [0] * servers
    chosen = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        server = min(range(servers), key=lambda index: (load[index], index))
        chosen[number] = server
        load[server] += sizes[number]
    return chosen
