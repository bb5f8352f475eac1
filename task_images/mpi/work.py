"""Handles of collectives and messages of the backend mpi (torch's Work), and the thread of a group."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class Done(dist.Work):
    """The result of an operation that was complete when the call returned."""

    def __init__(self, tensors: Any = None) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """True at once."""
        return True

    def is_completed(self) -> bool:
        """True: the operation was complete when the call returned."""
        return True

    def is_success(self) -> bool:
        """True: the call itself would have raised an error."""
        return True

    def result(self) -> Any:
        """The tensors of the call."""
        return self._tensors

    def get_future(self) -> Any:
        """A completed future."""
        future: Any = Future()
        future.set_result(self._tensors)
        return future


class Pending(Done):
    """A collective queued in the group's thread."""

    def __init__(self, tensors: Any) -> None:
        super().__init__(tensors)
        self.future: Any = Future()

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the thread; raises what the collective raised."""
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the thread is done with it."""
        return bool(self.future.done())

    def is_success(self) -> bool:
        """Whether the thread is done with it."""
        return self.is_completed()

    def get_future(self) -> Any:
        """A future that the thread completes."""
        return self.future


class Message(Done):
    """A message in flight. `arrive` copies received data to its destination."""

    def __init__(self, mpi: Any, request: Any, tensors: list[Tensor], arrive: Callable[[], None] | None = None) -> None:
        super().__init__(tensors)
        self._status = mpi.Status()
        self._request = request
        self._arrive = arrive

    def wait(self, timeout: Any = None) -> bool:
        """Wait for MPI, then copy received data to its destination."""
        if self._request:
            self._request.Wait(self._status)
            self._close()
        return True

    def is_completed(self) -> bool:
        """Ask MPI without waiting."""
        if self._request and self._request.Test(self._status):
            self._close()
        return not self._request

    def is_success(self) -> bool:
        """Whether MPI is done with it."""
        return self.is_completed()

    def get_future(self) -> Any:
        """Wait, then return a completed future."""
        self.wait()
        return super().get_future()

    def source_rank(self) -> int:
        """The rank that sent the received message."""
        return int(self._status.Get_source())

    _source_rank = source_rank

    def _close(self) -> None:
        self._request = None
        if self._arrive:
            self._arrive()


class Awaited(Message):
    """A message from whichever rank sends first. Polls each source in turn, because MPI_ANY_SOURCE of MPICH over UCX
    hangs if messages of several ranks arrived before the call."""

    def __init__(
        self, mpi: Any, ask: Callable[[int], Any], sources: Sequence[int], tensors: list[Tensor], buffer: Any,
        arrive: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(mpi, None, tensors, arrive)
        self._ask = ask
        self._sources = sources
        self._buffer = buffer
        self._came = False

    def wait(self, timeout: Any = None) -> bool:
        """Poll one rank after the other until a message has arrived."""
        while not self.is_completed():
            time.sleep(0)  # let other threads run
        return True

    def is_completed(self) -> bool:
        """Poll each rank once, and receive the first message that has arrived."""
        for source in () if self._came else self._sources:
            message = self._ask(source)
            if message is not None:
                message.Recv(self._buffer, self._status)
                self._came = True
                self._close()
                break
        return self._came


class Thread:
    """Runs calls one after another, in the order of submission. The thread starts with the first call.

    `last` is the last submitted call; None if all are known to be done.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Pending] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.last: Pending | None = None

    def submit(self, call: Callable[[], None], tensors: Any) -> Pending:
        """Queue a call and return its work; the thread starts with the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpi", daemon=True)
            self._thread.start()
        self.last = Pending(tensors)
        self._queue.put((call, self.last))
        return self.last

    def drain(self) -> None:
        """Wait for all submitted calls. Returns at once in the thread itself, e.g. in a callback."""
        last = self.last
        if last is not None and threading.current_thread() is not self._thread:
            last.future.wait()
            self.last = None

    def close(self) -> None:
        """Finish all queued calls, end the thread, and wait for it."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            call, work = item
            try:
                call()
            except Exception as error:
                work.future.set_exception(error)
            else:
                work.future.set_result(work.result())
