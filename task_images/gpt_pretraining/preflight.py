"""Checks from numbers alone: standard library only, so that the tool refuses a run before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from task_images.gpt_pretraining.shapes import SHAPES, Shape
from task_images.language.layout import (
    Layout,
    LayoutError,
    check_tensor_parallel,
    plan_batch,
    plan_layout,
)


@dataclass(frozen=True)
class Plan:
    """What follows from parameters and number of ranks."""

    shape: Shape
    layout: Layout
    global_batch: int
    passes: int
    micro_batch: int


def choose_shape(parameters: Mapping[str, Any]) -> Shape:
    """The model's shape, with the run's own vocabulary and context. Raises LayoutError if they do not go together."""
    shape = SHAPES[parameters["model"]]
    if parameters["vocabulary"]:
        shape = replace(shape, vocabulary=parameters["vocabulary"])
    shape = replace(shape, multiple=parameters["vocabulary_multiple"], **choose_parts(parameters))
    length = parameters["sequence_length"]
    if length > shape.context:
        if shape.positions == "learned":
            raise LayoutError(
                f"sequence_length is {length}, but the model {parameters['model']} has {shape.context} positions",
                f"--set sequence_length={shape.context}, or a model with rotary positions",
            )
        shape = replace(shape, context=length)
    if parameters["data"] == "python-text" and shape.vocabulary < 256:
        raise LayoutError(f"bytes need a vocabulary of 256, the model has {shape.vocabulary}", "--set vocabulary=256")
    return shape


def choose_parts(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the shape that the parameters name instead of the model's own."""
    found = {name: parameters[name] for name in ("norm", "positions", "activation") if parameters[name] != "model"}
    found |= {name: parameters[name] == "yes" for name in ("qk_norm", "tied") if parameters[name] != "model"}
    if parameters["softcap"] >= 0:
        found["softcap"] = parameters["softcap"]
    return found


def make_plan(parameters: Mapping[str, Any], ranks: int, per_node: int = 1) -> Plan:
    """Raises LayoutError, with what to change, if the mesh or the batch does not fit."""
    shape = choose_shape(parameters)
    tensor, replicas = parameters["tensor_parallel"], parameters["replicas"]
    layout = plan_layout(parameters["parallel"], ranks, tensor, replicas, per_node)
    if layout.tensor > 1:
        if shape.positions == "learned" or shape.bias or shape.embedding_norm:
            raise LayoutError(
                f"the model {parameters['model']} has parts that do not support tensor parallelism: learned"
                " positions, biases, or a norm of the embedding",
                "--set parallel=fsdp2, or a Llama model (1B, 8B)",
            )
        length = parameters["sequence_length"]
        check_tensor_parallel(layout, heads=shape.heads, kv_heads=shape.kv_heads, length=length, hidden=shape.hidden)
        if parameters["loss_chunk"]:
            raise LayoutError(
                "loss_chunk does not support tensor parallelism, which already splits sequences",
                "--set loss_chunk=0, or --set parallel=fsdp2",
            )
    global_batch, passes, micro_batch = plan_batch(layout, parameters)
    return Plan(shape, layout, global_batch, passes, micro_batch)


def check(parameters: Mapping[str, Any], ranks: int, per_machine: int) -> None:
    """Raise LayoutError if `ranks` ranks, `per_machine` of them on each machine, cannot run this."""
    make_plan(parameters, ranks, per_machine)
