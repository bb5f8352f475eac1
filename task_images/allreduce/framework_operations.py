"""The collectives of `operations` as JAX and TensorFlow have them, on the same numbers and with the same check."""

from __future__ import annotations

from typing import Any

from task_images.allreduce.operations import IN_PLACE, Buffers, Call, describe
from task_images.frameworks import open_framework


def make(collective: str, buffers: Buffers, elements: int, place: str) -> Call:
    """The call with its buffers. Raises NotImplementedError for what the framework does not have."""
    ranks = open_framework(buffers.world)
    if collective not in ranks.collectives:
        raise NotImplementedError(f"{ranks.title} does not support it, or it is not measured")
    if place == IN_PLACE and collective not in ranks.in_place:
        raise NotImplementedError(f"{ranks.title} supports it only out of place: --set places=out_of_place")
    content = describe(collective, buffers, elements)
    host = buffers.allocate(content.sent)
    compiled = ranks.collective(collective, donate=place == IN_PLACE)
    arrays: dict[str, Any] = {}

    def fill() -> None:
        content.fill(host)
        arrays.update(send=ranks.put(host), result=None)

    def call() -> None:
        arrays["result"] = compiled(arrays["send"])
        if place == IN_PLACE:
            arrays["send"] = arrays["result"]

    return Call(fill, call, lambda: content.wrong(ranks.get(arrays["result"])), (host,))
