"""Calibration for predictions: when each gradient is ready, and how long messages of several sizes take.

`calibrate` runs a few steps on all ranks without communication, and restores model, random states and data. More steps,
with unrelated messages in flight, show how much communication slows computation on the same cores. The computation of
compressing methods is timed without a network. Rank 0 writes calibration.json to its output folder, for mlbench
predict; after training, `add_buckets` adds the message sizes of the run's method.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from task_images.comm.base import MakeOptimizer
from task_images.harness.codec_costs import CodecTimes, measure_codecs
from task_images.harness.cores import effective_cores
from task_images.harness.distributed import World

FILE = "calibration.json"
VERSION = 1
WARM_UP, STEPS = 3, 24
SIZES = (4096, 16_384, 65_536, 262_144, 1 << 20, 4 << 20)
SAMPLES = 9
MAX_SECONDS_PER_SIZE = 2.0
PAIRS = 8  # pairs of steps, one without and one with messages in flight
BESIDE_BYTES = 1 << 20  # size of these messages
MAX_BESIDE = 32  # most messages per step
BESIDE_AT_ONCE = 2  # messages in flight at a time, limited by gloo's threads
MIN_BESIDE_SHARE = 0.2  # share of the computation with messages in flight below which its slowdown is noise
OVERLAPPED = ("gloo", "nccl")  # backends that communicate during computation


class TensorTimes(TypedDict):
    """A parameter: its bytes, and when its gradient was ready (seconds after the step's start, over steps)."""

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


class OverlapTimes(TypedDict):
    """Computation with concurrent messages: medians over pairs of steps, seconds of the slowest rank.

    alone, beside   forward and backward pass without and with messages in flight
    communicated    seconds of the pass during which messages were in flight
    """

    alone: float
    beside: float
    communicated: float


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
    tensors: list[TensorTimes]  # in the order in which gradients are ready
    data: list[float]  # until a batch is on the device; the times below begin after it
    forward: list[float]  # until the backward pass begins
    backward: list[float]  # until it ends
    optimizer: list[float]
    step: list[float]  # the whole step, without communication
    collectives: list[CollectiveTimes]
    overlap: OverlapTimes | None
    codecs: list[CodecTimes]  # computing time of compressing methods
    buckets: NotRequired[list[int]]  # bytes of messages of the run's method, in the order of sending


@contextmanager
def keep_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore parameters, buffers and random states after the block."""
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
    take_batch: Callable[[], Callable[[], Tensor]],
    batch: int,
) -> None:
    """Measure steps of `model`, before a strategy is attached, and write the document.

    `take_batch` loads a batch of `batch` samples and returns a function that computes its loss. Collective.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    collectives = [_measure(world, size) for size in SIZES] if world.size > 1 else []
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
    codecs = measure_codecs(world, shapes)
    with keep_state(model, world.device):
        steps = _Steps(world, model, make_optimizer(model), take_batch)
        measured = [steps.take() for _ in range(WARM_UP + STEPS)][WARM_UP:]
        overlap = _measure_overlap(world, steps, collectives)
        steps.close()
    ready = steps.ready[WARM_UP : WARM_UP + STEPS]
    order = sorted(steps.sizes, key=lambda name: statistics.median(row[name] for row in ready))
    columns = [[row[name] for row in ready] for name in order]
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
            {"name": name, "bytes": steps.sizes[name], "rows": steps.rows[name], **_ready(values)}
            for name, values in zip(order, slowest, strict=True)
        ],
        **_phases(world, measured),  # type: ignore[typeddict-item]
        "collectives": collectives,
        "overlap": overlap,
        "codecs": codecs,
    }
    if world.is_first:
        _path(world).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def add_buckets(world: World, sizes: Sequence[int]) -> None:
    """Add the bytes of each message of a step of the run's method to rank 0's document, if there is one."""
    path = _path(world)
    if not world.is_first or not sizes or not path.exists():
        return
    document: CalibrationDocument = json.loads(path.read_text("utf-8"))
    document["buckets"] = list(sizes)
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _path(world: World) -> Path:
    return Path(world.contract.output_dir, FILE)


class _Steps:
    """Runs steps on all ranks at once, without communication, and times each gradient."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        take_batch: Callable[[], Callable[[], Tensor]],
    ) -> None:
        self._world, self._optimizer, self._take_batch = world, optimizer, take_batch
        model.train()
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in named}
        self.rows = {name: parameter.shape[0] if parameter.dim() > 1 else 1 for name, parameter in named}
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

    def take(self, before: Callable[[], object] = lambda: None) -> Mapping[str, float]:
        """Seconds of loading a batch, then from the step's start to the end of each phase; `before` is called in
        between."""
        self._world.barrier()
        self._row = {}
        loaded = time.perf_counter()
        compute_loss = self._take_batch()
        self._world.synchronize()
        loaded = time.perf_counter() - loaded
        before()
        self._begun = time.perf_counter()
        loss = compute_loss()
        self._world.synchronize()
        forward = time.perf_counter() - self._begun
        loss.backward()  # type: ignore[no-untyped-call]
        self._world.synchronize()
        backward = time.perf_counter() - self._begun
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        self._world.synchronize()
        step = time.perf_counter() - self._begun
        # An unused parameter counts as ready at the end of the pass.
        self.ready.append({name: self._row.get(name, backward) for name in self.sizes})
        return {"data": loaded, "forward": forward, "backward": backward, "optimizer": step - backward, "step": step}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _phases(world: World, measured: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {
        name: _spread(world.max([row[name] for row in measured]))
        for name in ("data", "forward", "backward", "optimizer", "step")
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


def _measure_overlap(world: World, steps: _Steps, collectives: Sequence[CollectiveTimes]) -> OverlapTimes | None:
    """Alternate steps without and with concurrent messages; None if the result would be meaningless.

    This is the case if the backend does not communicate during computation, or messages would be in flight for too
    little of it.
    """
    if world.backend not in OVERLAPPED or not collectives:
        return None
    each = next(row["p50"] for row in collectives if row["bytes"] == BESIDE_BYTES)
    compute = statistics.median(world.max([steps.take()["backward"] for _ in range(3)]))
    wanted = BESIDE_AT_ONCE * compute / max(each, 1e-6)
    count = int(min(MAX_BESIDE, max(1, math.ceil(world.agree(wanted)))))
    busy = world.agree(max(each, count * each / BESIDE_AT_ONCE))
    if busy < MIN_BESIDE_SHARE * world.agree(compute):
        return None
    buffers = [torch.ones(BESIDE_BYTES // 4, device=world.device) for _ in range(count)]
    works: list[dist.Work | None] = []

    def send() -> None:
        works.extend(dist.all_reduce(buffer, async_op=True) for buffer in buffers)

    alone, beside = [], []
    for _ in range(PAIRS):
        alone.append(steps.take()["backward"])
        beside.append(steps.take(send)["backward"])
        for work in works:
            if work is not None:
                work.wait()
        world.synchronize()
        works.clear()
    slowed = statistics.median(world.max(beside))
    return {
        "alone": round(statistics.median(world.max(alone)), 7),
        "beside": round(slowed, 7),
        "communicated": round(min(slowed, busy), 7),
    }
