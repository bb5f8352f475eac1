"""The collectives of `operations` as JAX has them, on the same numbers and with the same check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from task_images.allreduce.operations import IN_PLACE, Buffers, Call
from task_images.harness.distributed import World
from task_images.harness.jax_ranks import AXIS, NAME, JaxRanks

__all__ = ["NAME", "make"]
_opened: list[JaxRanks] = []


def make(collective: str, buffers: Buffers, elements: int, place: str) -> Call:
    """The call with its buffers. Raises NotImplementedError for what JAX does not have."""
    if collective not in _MAKERS:
        raise NotImplementedError("not measured with JAX")
    if place == IN_PLACE and collective not in _SAME_SHAPE:
        raise NotImplementedError("JAX has it out of place only: --set places=out_of_place")
    ranks = _open(buffers.world)
    fill, function, wrong, size = _MAKERS[collective](buffers, ranks.jax.lax, elements)
    host = buffers.allocate(size)
    compiled = ranks.compile(function, donate=place == IN_PLACE)
    arrays: dict[str, Any] = {}

    def fill_anew() -> None:
        fill(host)
        arrays.update(send=ranks.put(host), result=None)

    def call() -> None:
        sent = arrays["send"]
        arrays["result"] = compiled(sent).block_until_ready()
        if place == IN_PLACE:
            arrays["send"] = arrays["result"]

    return Call(fill_anew, call, lambda: wrong(ranks.get(arrays["result"])), (host,))


def _open(world: World) -> JaxRanks:
    """The ranks of JAX, once per process; they leave with the world."""
    if not _opened:
        _opened.append(JaxRanks(world))
        world.companions.append(_opened[0])
    return _opened[0]


Parts = tuple[Callable[[Any], object], Callable[[Any], Any], Callable[[Any], int], int]


def _all_reduce(buffers: Buffers, lax: Any, elements: int) -> Parts:
    pattern = buffers.pattern
    return pattern.own.fill, lambda row: lax.psum(row, AXIS), pattern.total.wrong, elements


def _all_gather(buffers: Buffers, lax: Any, elements: int) -> Parts:
    pattern, part = buffers.pattern, elements // buffers.world.size

    def wrong(result: Any) -> int:
        return sum(pattern.moved.wrong(row, pattern.place(rank)) for rank, row in enumerate(result.split(part)))

    def fill(host: Any) -> None:
        pattern.moved.fill(host, pattern.place(buffers.world.rank))

    return fill, lambda row: lax.all_gather(row, AXIS, tiled=True), wrong, part


def _reduce_scatter(buffers: Buffers, lax: Any, elements: int) -> Parts:
    pattern, begin = buffers.pattern, buffers.world.rank * (elements // buffers.world.size)
    return (
        pattern.own.fill,
        lambda row: lax.psum_scatter(row, AXIS, tiled=True),
        lambda result: pattern.total.wrong(result, begin),
        elements,
    )


def _all_to_all(buffers: Buffers, lax: Any, elements: int) -> Parts:
    pattern, rank, part = buffers.pattern, buffers.world.rank, elements // buffers.world.size

    def wrong(result: Any) -> int:
        rows = enumerate(result.split(part))
        return sum(pattern.moved.wrong(row, pattern.place(source, rank * part)) for source, row in rows)

    def fill(host: Any) -> None:
        pattern.moved.fill(host, pattern.place(rank))

    return fill, lambda row: lax.all_to_all(row, AXIS, 0, 0, tiled=True), wrong, elements


_MAKERS: dict[str, Callable[[Buffers, Any, int], Parts]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
_SAME_SHAPE = ("all_reduce",)
