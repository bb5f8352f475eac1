"""Sizes of the encoders, and what follows from parameters and number of ranks: FLOPs, batches.

Standard library only, so that the tool refuses a run that cannot work before anything starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from task_images.language.plan import PlanError, PretrainingPlan, plan_batch


@dataclass(frozen=True)
class Shape:
    """One encoder. `vocabulary` is padded to a multiple of 8; `initial`: deviation of a matrix's initial values."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    hidden: int
    initial: float = 0.02

    @property
    def parameters(self) -> int:
        """Embeddings, layers, pooler, head of the masked tokens (tied to the embedding), head of the next sentence."""
        v, t, d, f = self.vocabulary, self.context, self.width, self.hidden
        embeddings = (v + t + 2) * d + 2 * d
        layers = self.layers * (4 * d * d + 2 * d * f + 9 * d + f)
        pooler, masked, following = d * d + d, d * d + d + 2 * d + v, 2 * d + 2
        return embeddings + layers + pooler + masked + following

    def flops_per_sequence(self, length: int, scored: int) -> float:
        """FLOPs of forward and backward pass of one sequence of `length` tokens, `scored` of which get logits."""
        d = self.width
        body = 6.0 * length * self.layers * (4 * d * d + 2 * d * self.hidden) + 12.0 * self.layers * d * length**2
        return body + 6.0 * scored * (d * d + d * self.vocabulary) + 6.0 * (d * d + 2 * d)


SHAPES = {
    "tiny": Shape(264, 32, 64, 2, 4, 256, initial=0.05),
    "base": Shape(30_528, 512, 768, 12, 12, 3072),
    "large": Shape(30_528, 512, 1024, 24, 16, 4096),
}
FLOPS_FORMULA = "6 T L (4 d^2 + 2 d f) + 12 L d T^2 + 6 k (d^2 + d V) + 6 (d^2 + 2 d) per sequence, k scored tokens"
LEAST_LENGTH = 8


def make_plan(parameters: Mapping[str, Any], ranks: int) -> PretrainingPlan:
    """Raises PlanError, with what to change, if something does not fit."""
    shape, length = SHAPES[parameters["model"]], parameters["sequence_length"]
    if parameters["vocabulary"]:
        shape = replace(shape, vocabulary=parameters["vocabulary"])
    if not LEAST_LENGTH <= length <= shape.context:
        raise PlanError(
            f"sequence_length is {length}; the model {parameters['model']} has {shape.context} positions, and two"
            f" sentences need {LEAST_LENGTH}",
            f"--set sequence_length={shape.context}",
        )
    if parameters["data"] == "python-text" and shape.vocabulary < 260:
        raise PlanError(f"bytes and special tokens are 260, the model has {shape.vocabulary}", "--set vocabulary=264")
    if parameters["data"] == "legacy" and not parameters["blocks"]:
        raise PlanError("data=legacy trains on one fixed batch, so it is only for throughput", "--set blocks=10")
    scored = length if parameters["data"] == "legacy" else max(1, round(0.15 * length))
    return PretrainingPlan(shape, *plan_batch(ranks, parameters), scored)
