"""Handles of collectives and messages of the backend mpi (torch's Work), and the thread of a group."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class Collective(dist.Work):
    """A collective: one that was complete when the call returned, or one queued in the group's thread."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.tensors = tensors
        self.future: Any = Future()

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the thread; raises what the collective raised."""
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self.future.done())

    is_success = is_completed

    def result(self) -> Any:
        """The tensors of the call."""
        return self.tensors

    def get_future(self) -> Any:
        """A future that is completed with the tensors."""
        return self.future


class Message(Collective):
    """A message in flight. `arrive` copies received data to its destination."""

    def __init__(self, request: Any, tensors: list[Tensor], arrive: Callable[[], None] | None = None) -> None:
        super().__init__(tensors)
        self._request = request
        self._arrive = arrive

    def wait(self, timeout: Any = None) -> bool:
        """Wait for MPI, then copy received data to its destination."""
        if self._request:
            self._request.Wait()
            self._close()
        return True

    def is_completed(self) -> bool:
        """Ask MPI without waiting."""
        if self._request and self._request.Test():
            self._close()
        return not self._request

    is_success = is_completed

    def get_future(self) -> Any:
        """Wait, then return a completed future."""
        self.wait()
        return self.future

    def _close(self) -> None:
        self._request = None
        if self._arrive:
            self._arrive()
        self.future.set_result(self.tensors)


class Thread:
    """Runs calls one after another, in the order of submission. The thread starts with the first call.

    `last` is the last submitted call; None if all are known to be done.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Collective] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.last: Collective | None = None

    def submit(self, call: Callable[[], None], tensors: Any) -> Collective:
        """Queue a call and return its work; the thread starts with the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpi", daemon=True)
            self._thread.start()
        self.last = Collective(tensors)
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
                work.future.set_result(work.tensors)
