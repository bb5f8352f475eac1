"""The collectives of `operations` as TensorFlow has them, on the same numbers and with the same check."""

from __future__ import annotations

from typing import Any

from task_images.allreduce.operations import IN_PLACE, Buffers, Call, describe
from task_images.tensorflow_ranks import COLLECTIVES, open_tensorflow


def make(collective: str, buffers: Buffers, elements: int, place: str) -> Call:
    """The call with its buffers. Raises NotImplementedError for what TensorFlow does not have."""
    ranks = open_tensorflow(buffers.world)
    if collective not in COLLECTIVES:
        raise NotImplementedError("TensorFlow does not support it, or it is not measured")
    if place == IN_PLACE:
        raise NotImplementedError("TensorFlow supports it only out of place: --set places=out_of_place")
    content = describe(collective, buffers, elements)
    host = buffers.allocate(content.sent)
    compiled = ranks.collective(collective)
    arrays: dict[str, Any] = {}

    def fill() -> None:
        content.fill(host)
        arrays["send"] = ranks.put(host)

    def call() -> None:
        arrays["result"] = compiled(arrays["send"])

    return Call(fill, call, lambda: content.wrong(ranks.get(arrays["result"])))
