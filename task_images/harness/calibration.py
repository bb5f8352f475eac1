"""What a prediction needs to know of a run: when each gradient is ready, and what messages of several sizes take.

`calibrate` trains a few steps without communication, while all ranks compute, and puts model, random numbers and data
back as they were. Rank 0 leaves calibration.json in its output folder (mlbench predict reads it).
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from task_images.comm.base import MakeOptimizer
from task_images.harness.cores import effective_cores
from task_images.harness.distributed import World

FILE = "calibration.json"
VERSION = 1
WARM_UP, STEPS = 3, 12
SIZES = (4096, 16_384, 65_536, 262_144, 1 << 20, 4 << 20)
SAMPLES = 9
MAX_SECONDS_PER_SIZE = 2.0


class TensorTimes(TypedDict):
    """A parameter: its bytes, and when its gradient was ready, seconds after the step's start, over steps."""

    name: str
    bytes: int
    ready_p10: float
    ready_p50: float
    ready_p90: float


class CollectiveTimes(TypedDict):
    """All-reduces of one size: the slowest rank's seconds."""

    operation: str
    bytes: int
    samples: int
    p10: float
    p50: float
    p90: float


class CalibrationDocument(TypedDict):
    """calibration.json. Phases are seconds of the slowest rank, as p10, p50 and p90 over steps."""

    schema_version: int
    ranks: int
    backend: str
    framework: str
    threads: int
    cores: float
    load_before: float | None
    batch: int
    tensors: list[TensorTimes]  # in the order in which they are ready
    forward: list[float]  # until the backward pass begins
    backward: list[float]  # until it ends
    optimizer: list[float]
    step: list[float]  # all of it, without communication
    collectives: list[CollectiveTimes]


@contextmanager
def keep_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave parameters, buffers and random numbers as they were."""
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    devices = [device] if device.type == "cuda" else []
    was_training = model.training
    with torch.random.fork_rng(devices=devices):
        yield
    model.load_state_dict(kept)
    model.zero_grad(set_to_none=True)
    model.train(was_training)


def calibrate(
    world: World,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    loss_of: Callable[[], Tensor],
    batch: int,
) -> None:
    """Measure steps of `model`, before any strategy has it, and leave the document.

    `loss_of` is forward pass and loss of a batch of `batch` samples, the same one for each step. Collective.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with keep_state(model, world.device):
        steps = _Steps(world, model, make_optimizer(model), loss_of)
        measured = [steps.take() for _ in range(WARM_UP + STEPS)][WARM_UP:]
        steps.close()
    order = sorted(steps.sizes, key=lambda name: statistics.median(row[name] for row in steps.ready[WARM_UP:]))
    columns = [[row[name] for row in steps.ready[WARM_UP:]] for name in order]
    slowest = [world.max(column) for column in columns]
    document: CalibrationDocument = {
        "schema_version": VERSION,
        "ranks": world.size,
        "backend": world.backend,
        "framework": f"torch {torch.__version__}",
        "threads": world.threads,
        "cores": float(effective_cores()),
        "load_before": load,
        "batch": batch,
        "tensors": [
            {"name": name, "bytes": steps.sizes[name], **_ready(values)}
            for name, values in zip(order, slowest, strict=True)
        ],
        **_phases(world, measured),  # type: ignore[typeddict-item]
        "collectives": [_measure(world, size) for size in SIZES] if world.size > 1 else [],
    }
    if world.is_first:
        path = Path(world.contract.output_dir, FILE)
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


class _Steps:
    """Steps of all ranks at once, without communication, with a time for each gradient."""

    def __init__(
        self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]
    ) -> None:
        self._world, self._optimizer, self._loss_of = world, optimizer, loss_of
        model.train()
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in named}
        self.ready: list[dict[str, float]] = []
        self._begun = 0.0
        self._row: dict[str, float] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note(name))  # type: ignore[no-untyped-call]
            for name, parameter in named
        ]

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._world.synchronize()
            self._row[name] = time.perf_counter() - self._begun

        return note

    def take(self) -> Mapping[str, float]:
        """Seconds from the step's start to the end of each phase."""
        self._world.barrier()
        self._row = {}
        self._begun = time.perf_counter()
        loss = self._loss_of()
        self._world.synchronize()
        forward = time.perf_counter() - self._begun
        loss.backward()  # type: ignore[no-untyped-call]
        self._world.synchronize()
        backward = time.perf_counter() - self._begun
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        self._world.synchronize()
        step = time.perf_counter() - self._begun
        # A parameter that took no part is ready when the pass is over.
        self.ready.append({name: self._row.get(name, backward) for name in self.sizes})
        return {"forward": forward, "backward": backward, "optimizer": step - backward, "step": step}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _phases(world: World, measured: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {
        name: _spread(world.max([row[name] for row in measured]))
        for name in ("forward", "backward", "optimizer", "step")
    }


def _ready(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = _spread(values)
    return {"ready_p10": low, "ready_p50": middle, "ready_p90": high}


def _spread(values: Sequence[float]) -> list[float]:
    """p10, p50 and p90."""
    ordered = sorted(values)
    return [round(ordered[round(share * (len(ordered) - 1))], 7) for share in (0.1, 0.5, 0.9)]


def _measure(world: World, size: int) -> CollectiveTimes:
    """All-reduces of `size` bytes, each after a barrier; the slowest rank's seconds."""
    buffer = torch.ones(size // 4, device=world.device)
    times: list[float] = []
    begun = time.perf_counter()
    for number in range(SAMPLES + 2):
        world.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        world.synchronize()
        times.append(time.perf_counter() - start)
        buffer.fill_(1)
        if number >= 4 and world.agree(time.perf_counter() - begun) > MAX_SECONDS_PER_SIZE:
            break
    low, middle, high = _spread(world.max(times[2:]))
    return {"operation": "all_reduce", "bytes": size, "samples": len(times) - 2, "p10": low, "p50": middle, "p90": high}
