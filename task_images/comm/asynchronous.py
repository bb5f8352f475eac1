"""Asynchronous parameter servers: each trainer adds its own updates to the servers' weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from task_images.comm.base import MethodState
from task_images.comm.client import connect_servers
from task_images.comm.drifting import Drifting
from task_images.comm.methods import parse_size
from task_images.comm.wire import PULL, PUSH, SET, TURN, Frame, assign


class AsynchronousServers(Drifting):
    """Each trainer makes a step, sends the change and takes the servers' weights (async). With SSP it first waits until
    it is at most a given number of updates ahead of the slowest trainer.

    A trainer steps as if it trained alone and sends 1/P of the change, so weight decay and Adam's normalized steps also
    add up to one synchronous update.
    """

    def _connect(self) -> None:
        super()._connect()
        self._ahead = 0
        if self.world.size == 1:
            return
        self._client = connect_servers(self.world, self.method.server_count)
        self._base = self._collect()
        limit = self._base.numel()
        if self.method.partition != "none":
            limit = max(1, parse_size(self.method.partition) // self._base.element_size())
        self._limit = limit
        parts = torch.split(self._base, limit)
        self._server_of = assign([part.numel() for part in parts], self.method.server_count)
        self._set()

    def _set(self) -> None:
        """Initialize the servers with rank 0's weights."""
        if self.world.rank == 0:
            self._ask(SET, self._base)
        self.world.barrier()
        self._met = True

    def _exchange(self, updated: bool, rate: float) -> None:
        self._update += 1
        if self.world.size > 1:
            if self._met:
                self._await_turn()
            change = (self._collect() - self._base) / self.world.size
            self._take(self._ask(PUSH, change))

    def _take(self, weights: Tensor) -> None:
        self._base = weights.to(self._base)
        self._distribute(self._base)

    def _ask(self, kind: int, flat: Tensor) -> Tensor:
        """Send all parts to their servers, and join the answers."""
        parts = torch.split(flat, self._limit)
        for number, part in enumerate(parts):
            if kind != PULL:
                self._link.book(part, 1)
            self._client.send(
                self._server_of[number], Frame(kind, number, self._update, part if kind != PULL else torch.empty(0))
            )
        answers = [self._client.receive(self._server_of[number]) for number in range(len(parts))]
        self._ahead = max(self._ahead, *(answer.clock for answer in answers))
        return torch.cat([answer.tensor for answer in answers])

    def _await_turn(self) -> None:
        """Wait until this trainer may send its first change after a barrier. Only the first server gives turns: with
        two, each could admit a different trainer, and both would wait for the changes sent to the other server
        (deadlock)."""
        self._client.send(0, Frame(TURN, 0, 0, torch.empty(0)))
        self._client.receive(0)
        self._met = False

    @contextmanager
    def _on_servers_weights(self) -> Iterator[None]:
        self.world.barrier()  # all changes have arrived
        self._take(self._ask(PULL, self._base))
        self.world.barrier()  # nobody continues before all have the weights
        self._met = True
        yield

    def consensus(self) -> AbstractContextManager[object]:
        """Within the block the model has the servers' weights."""
        return self._on_servers_weights() if self.world.size > 1 else nullcontext()

    def load_method_state(self, state: MethodState) -> None:
        super().load_method_state(state)
        if self.world.size > 1:
            self._base = self._collect()
            self._set()

    def stats(self) -> dict[str, float]:
        """The figures of drifting replicas, and the greatest number of updates by which this trainer was ahead."""
        return {**super().stats(), "most_updates_ahead": float(self._ahead)}
