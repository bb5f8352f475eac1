"""Asynchronous trainers that have met at a barrier send their first changes in turn, and wait for nobody afterwards."""

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from task_images.comm.server import ParameterServer, _serve_trainer
from task_images.comm.wire import DONE, PULL, PUSH, SET, TURN, Frame, receive_frame, send_frame

PARTS, WEIGHTS = 2, 1000
SECONDS = 60


class Trainer:
    """A trainer's end of a connection, which can stop in the middle of a request."""

    def __init__(self, state: ParameterServer, rank: int) -> None:
        self._stream, served = socket.socketpair()
        self._stream.settimeout(SECONDS)
        self.thread = threading.Thread(target=_serve_trainer, args=(state, served, rank), daemon=True)
        self.thread.start()

    def ask_for_turn(self) -> None:
        send_frame(self._stream, Frame(TURN, 0, 0, torch.empty(0)))

    def take_turn(self) -> None:
        assert receive_frame(self._stream).kind == TURN

    def push(self, update: int) -> None:
        for key in range(PARTS):
            send_frame(self._stream, make_push(key, update))

    def push_half(self, update: int) -> bytes:
        """Send half of a change; the rest, for `finish`."""
        whole = b"".join(write(make_push(key, update)) for key in range(PARTS))
        self._stream.sendall(whole[: len(whole) // 4])
        return whole[len(whole) // 4 :]

    def finish(self, rest: bytes) -> None:
        self._stream.sendall(rest)

    def receive(self) -> list[float]:
        """The first weight of each part of the answer."""
        return [float(receive_frame(self._stream).tensor[0]) for _ in range(PARTS)]

    def pull(self) -> list[float]:
        for key in range(PARTS):
            send_frame(self._stream, Frame(PULL, key, 0, torch.empty(0)))
        return self.receive()

    def is_answered(self, seconds: float) -> bool:
        self._stream.settimeout(seconds)
        try:
            return bool(self._stream.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self._stream.settimeout(SECONDS)

    def leave(self) -> None:
        self._stream.close()

    def end(self) -> None:
        send_frame(self._stream, Frame(DONE, 0, 0, torch.empty(0)))
        self.thread.join(SECONDS)
        self._stream.close()


class Recorder:
    """What would be sent over a connection."""

    def __init__(self) -> None:
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += bytes(data)


def write(frame: Frame) -> bytes:
    recorder = Recorder()
    send_frame(recorder, frame)  # type: ignore[arg-type]
    return recorder.sent


def make_push(key: int, update: int) -> Frame:
    return Frame(PUSH, key, update, torch.ones(WEIGHTS))


@pytest.fixture
def state() -> ParameterServer:
    """Weights of zeros; of an earlier model there were more."""
    found = ParameterServer(2, None)
    for count in (PARTS + 3, PARTS):
        for key in range(count):
            found.answer(0, Frame(SET, key, 0, torch.zeros(WEIGHTS)))
    return found


@pytest.fixture
def trainers(state: ParameterServer) -> Iterator[tuple[Trainer, Trainer]]:
    first, second = Trainer(state, 0), Trainer(state, 1)
    yield first, second
    first.end()
    second.end()
    assert not first.thread.is_alive()
    assert not second.thread.is_alive()


def test_first_changes_after_a_barrier_are_sent_in_turn_and_later_ones_are_not(
    trainers: tuple[Trainer, Trainer],
) -> None:
    first, second = trainers
    for begin in (0, 2):  # the second time after both have taken the weights at a barrier
        first.ask_for_turn()
        first.take_turn()
        second.ask_for_turn()
        rest = first.push_half(begin + 1)
        assert not second.is_answered(0.5), "the second trainer had its turn beside the first one"
        first.finish(rest)
        second.take_turn()
        second.push(begin + 1)
        answers = zip(first.receive(), second.receive(), strict=True)  # of each part; either change may come first
        assert [sorted(both) for both in answers] == [[2 * begin + 1.0, 2 * begin + 2.0]] * PARTS
        rest = first.push_half(begin + 2)
        second.push(begin + 2)
        assert second.receive() == [2 * begin + 3.0] * PARTS  # beside half a change of the first
        first.finish(rest)
        assert first.receive() == [2 * begin + 4.0] * PARTS
        assert first.pull() == second.pull() == [2 * begin + 4.0] * PARTS


def test_a_trainer_that_is_lost_in_its_turn_lets_the_next_one_in(state: ParameterServer) -> None:
    first, second = Trainer(state, 0), Trainer(state, 1)
    first.ask_for_turn()
    first.take_turn()
    second.ask_for_turn()
    first.push_half(1)
    assert not second.is_answered(0.5)
    first.leave()
    first.thread.join(SECONDS)
    assert state.failure == "lost trainer 0: connection closed by peer"
    second.take_turn()
    second.push(1)
    assert second.receive() == [1.0] * PARTS
    second.end()
