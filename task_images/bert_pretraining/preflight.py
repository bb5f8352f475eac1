"""Checks from numbers alone: standard library only, so that the tool refuses a run before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from task_images.bert_pretraining.shapes import SHAPES, Shape
from task_images.language.layout import (
    Layout,
    LayoutError,
    plan_batch,
    plan_layout,
)

LEAST_LENGTH = 8


@dataclass(frozen=True)
class Plan:
    """What follows from parameters and number of ranks. `scored`: positions of a sequence that get logits."""

    shape: Shape
    layout: Layout
    global_batch: int
    passes: int
    micro_batch: int
    scored: int


def make_plan(parameters: Mapping[str, Any], ranks: int, per_node: int = 1) -> Plan:
    """Raises LayoutError, with what to change, if something does not fit."""
    shape, length = SHAPES[parameters["model"]], parameters["sequence_length"]
    if parameters["vocabulary"]:
        shape = replace(shape, vocabulary=parameters["vocabulary"])
    if not LEAST_LENGTH <= length <= shape.context:
        raise LayoutError(
            f"sequence_length is {length}; the model {parameters['model']} has {shape.context} positions, and two"
            f" sentences need {LEAST_LENGTH}",
            f"--set sequence_length={shape.context}",
        )
    if parameters["data"] == "python-text" and shape.vocabulary < 260:
        raise LayoutError(f"bytes and special tokens are 260, the model has {shape.vocabulary}", "--set vocabulary=264")
    if "tp" in parameters["parallel"]:
        raise LayoutError(
            "BERT does not support tensor parallelism", "--set parallel=ddp, fsdp2 or hsdp; gpt_pretraining supports it"
        )
    if parameters["data"] == "legacy" and not parameters["blocks"]:
        raise LayoutError("data=legacy trains on one fixed batch, so it is only for throughput", "--set blocks=10")
    layout = plan_layout(parameters["parallel"], ranks, 0, parameters["replicas"], per_node)
    global_batch, passes, micro_batch = plan_batch(layout, parameters)
    scored = length if parameters["data"] == "legacy" else max(1, round(0.15 * length))
    return Plan(shape, layout, global_batch, passes, micro_batch, scored)


def check(parameters: Mapping[str, Any], ranks: int, per_machine: int) -> None:
    """Raise LayoutError if `ranks` ranks, `per_machine` of them on each machine, cannot run this."""
    make_plan(parameters, ranks, per_machine)
