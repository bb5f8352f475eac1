"""Asynchronous parameter servers: weights that every trainer adds to by its own steps."""

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
    """Every trainer makes its own steps, sends what they changed, and takes the servers' weights (async), perhaps after
    waiting until it is no more than so many updates ahead of the slowest (SSP).

    A trainer makes the step that it would make alone, and sends its share of the change: decay and Adam, which do not
    grow with the gradient, add up over the trainers to those of one synchronous update, too.
    """

    def _connect(self) -> None:
        super()._connect()
        self._ahead = 0
        if self.place.size == 1:
            return
        self._client = connect_servers(self.place.world, self.method.server_count)
        self._base = self._collect()
        limit = self._base.numel()
        if self.method.partition != "none":
            limit = max(1, parse_size(self.method.partition) // self._base.element_size())
        self._limit = limit
        parts = torch.split(self._base, limit)
        self._server_of = assign([part.numel() for part in parts], self.method.server_count)
        self._set()

    def _set(self) -> None:
        """Rank 0's weights become the servers'."""
        if self.place.rank == 0:
            self._ask(SET, self._base)
        self.place.world.barrier()
        self._met = True

    def _exchange(self, updated: bool, rate: float) -> None:
        self._update += 1
        if self.place.size > 1:
            if self._met:
                self._await_turn()
            change = (self._collect() - self._base) / self.place.size
            self._take(self._ask(PUSH, change))

    def _take(self, weights: Tensor) -> None:
        self._base = weights.to(self._base)
        self._distribute(self._base)

    def _ask(self, kind: int, flat: Tensor) -> Tensor:
        """Send all parts to their servers, and put their answers together."""
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
        """Until this trainer may send its first change after a barrier. Only the first server gives turns: if two did,
        each could let another trainer in, and both would wait for what those send to the other server first."""
        self._client.send(0, Frame(TURN, 0, 0, torch.empty(0)))
        self._client.receive(0)
        self._met = False

    @contextmanager
    def _on_servers_weights(self) -> Iterator[None]:
        self.place.world.barrier()  # all that was sent is in
        self._take(self._ask(PULL, self._base))
        self.place.world.barrier()  # nobody goes on before all have it
        self._met = True
        yield

    def consensus(self) -> AbstractContextManager[object]:
        """Put the servers' weights into the model for as long as the block lasts."""
        return self._on_servers_weights() if self.place.size > 1 else nullcontext()

    def load_method_state(self, state: MethodState) -> None:
        super().load_method_state(state)
        if self.place.size > 1:
            self._base = self._collect()
            self._set()

    def stats(self) -> dict[str, float]:
        """The figures of drifting replicas, and by how many updates this trainer was ahead at most."""
        return {**super().stats(), "most_updates_ahead": float(self._ahead)}
