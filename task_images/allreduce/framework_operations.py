"""The collectives of `operations` as JAX and TensorFlow have them, on the same numbers and with the same check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from task_images.allreduce.operations import IN_PLACE, Buffers, Call
from task_images.harness.frameworks import FRAMEWORKS, open_framework

__all__ = ["FRAMEWORKS", "make"]


def make(collective: str, buffers: Buffers, elements: int, place: str) -> Call:
    """The call with its buffers. Raises NotImplementedError for what the framework does not have."""
    ranks = open_framework(buffers.world)
    if collective not in ranks.collectives:
        raise NotImplementedError(f"{ranks.title} does not support it, or it is not measured")
    if place == IN_PLACE and collective not in ranks.in_place:
        raise NotImplementedError(f"{ranks.title} supports it only out of place: --set places=out_of_place")
    fill, wrong, size = _MAKERS[collective](buffers, elements)
    host = buffers.allocate(size)
    compiled = ranks.collective(collective, donate=place == IN_PLACE)
    arrays: dict[str, Any] = {}

    def fill_anew() -> None:
        fill(host)
        arrays.update(send=ranks.put(host), result=None)

    def call() -> None:
        arrays["result"] = compiled(arrays["send"])
        if place == IN_PLACE:
            arrays["send"] = arrays["result"]

    return Call(fill_anew, call, lambda: wrong(ranks.get(arrays["result"])), (host,))


Parts = tuple[Callable[[Any], object], Callable[[Any], int], int]


def _all_reduce(buffers: Buffers, elements: int) -> Parts:
    pattern = buffers.pattern
    return pattern.own.fill, pattern.total.wrong, elements


def _all_gather(buffers: Buffers, elements: int) -> Parts:
    pattern, part = buffers.pattern, elements // buffers.world.size

    def wrong(result: Any) -> int:
        return sum(pattern.moved.wrong(row, pattern.place(rank)) for rank, row in enumerate(result.split(part)))

    def fill(host: Any) -> None:
        pattern.moved.fill(host, pattern.place(buffers.world.rank))

    return fill, wrong, part


def _reduce_scatter(buffers: Buffers, elements: int) -> Parts:
    pattern, begin = buffers.pattern, buffers.world.rank * (elements // buffers.world.size)
    return pattern.own.fill, lambda result: pattern.total.wrong(result, begin), elements


def _all_to_all(buffers: Buffers, elements: int) -> Parts:
    pattern, rank, part = buffers.pattern, buffers.world.rank, elements // buffers.world.size

    def wrong(result: Any) -> int:
        rows = enumerate(result.split(part))
        return sum(pattern.moved.wrong(row, pattern.place(source, rank * part)) for source, row in rows)

    def fill(host: Any) -> None:
        pattern.moved.fill(host, pattern.place(rank))

    return fill, wrong, elements


_MAKERS: dict[str, Callable[[Buffers, int], Parts]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
