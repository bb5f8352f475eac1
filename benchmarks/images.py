"""ResNet-20 training throughput on two CPU ranks, ways in turn in the same two processes, medians of rounds, five runs:

    python benchmarks/images.py [--runs N]

    original   written as the original does: contiguous images, gradients concatenated, reduced, divided and split again
    ddp        the same model in torch's DistributedDataParallel with its defaults
    ddp last   the same with channels-last memory
    task       as the task trains: its loader, channels last, gradients as views into the buffer, fused SGD
    bf16       the task's option precision=bf16 on top: other mathematics

All get the same batches of the task's loader (two threads), which reads a file in CIFAR-10's own format that is made
here. A step is measured by the clock and by the CPU time of rank 0's process, in which its loader works, too. Waiting
for batches is measured in steps of the task alone, one after the other, all waits over all steps.
Budget, in each run: task / original at least 1.25, task / ddp at least 1.1, data wait at most 5 % of a step.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import _ranks
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from task_images.cifar10_resnet20.data import DEVIATION, MEAN, TRAINING, VALIDATION, load
from task_images.contract import Contract
from task_images.data import Batch
from task_images.images import ImageData, synthetic_images
from task_images.methods.base import Bsp
from task_images.resnet import resnet
from task_images.train import Precision
from task_images.world import World, open_world

RANKS, BATCH, ROUNDS = 2, 64, 24
IMAGES = 400  # in each of the six batch files
BUDGETS = {"original": 1.25, "ddp": 1.1}
RATIOS = "ratios.json"  # of a run, by rank 0
SGD: Mapping[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}


def main() -> None:
    if _ranks.is_rank():
        compare(open_world(Contract()))
        return
    parser = argparse.ArgumentParser(description="ResNet-20 on two CPU ranks against other ways to train it.")
    parser.add_argument("--runs", type=int, default=5, help="runs, each of two processes of its own")
    runs = parser.parse_args().runs
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder, "cifar-10-batches-bin"))
        for _ in range(runs):
            if code := _ranks.start(__file__, RANKS, {"MLBENCH_DATA_DIR": folder}):
                sys.exit(code)
            for name, ratio in json.loads(Path(folder, RATIOS).read_text()).items():
                found.setdefault(name, []).append(ratio)
    for name, ratios in found.items():
        median = statistics.median(ratios)
        print(f"{name:<24} median {median:.2f}, {min(ratios):.2f} to {max(ratios):.2f} in {runs} runs")


def write_files(folder: Path) -> None:
    """The six files of the binary version: records of a byte for the label and 3072 for the image."""
    folder.mkdir()
    images, labels = synthetic_images(6 * IMAGES, 10, 32, 1, "training")
    records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(len(labels), -1)], axis=1)
    for name, part in zip((*TRAINING, *VALIDATION), np.split(records, 6), strict=True):
        (folder / f"{name}.bin").write_bytes(part.tobytes())


def compare(world: World) -> None:
    ways = {
        "original": original(world),
        "ddp": ddp(world, channels_last=False),
        "ddp last": ddp(world, channels_last=True),
        "task": task(world, "fp32"),
        "bf16": task(world, "bf16"),
    }
    data = make_data(world, channels_last=False)
    batches: Iterator[Batch] = iter([])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, ROUNDS):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            batch = next(batches, None)
            if batch is None:
                batches = iter(data.training(number + 2))
                batch = next(batches)
            world.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            ways[name](batch)
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
                cpu[name].append(time.process_time() - begin_cpu)
    wait = data_wait(ways["task"], data)
    if world.is_first:
        median, spent = ({name: statistics.median(times[name]) for name in ways} for times in (seconds, cpu))
        for name, value in median.items():
            print(f"{name:<9} {1e3 * value:8.1f} ms a step  {RANKS * BATCH / value:7.0f} img/s", end="")
            print(f"  CPU {1e3 * spent[name]:8.1f} ms")
        ratios = {}
        for other in ("original", "ddp", "ddp last"):
            speed = ratios[f"speed, task / {other}"] = median[other] / median["task"]
            share = ratios[f"CPU, task / {other}"] = spent["task"] / spent[other]
            budget = f" (budget {BUDGETS[other]})" if other in BUDGETS else ""
            print(f"task / {other:<9} {speed:.2f} times as fast{budget}, {share:.2f} of the CPU time")
        print(f"data wait        {wait:.2%} of a step (budget 5 %)", flush=True)
        Path(world.contract.data_dir or "", RATIOS).write_text(json.dumps(ratios))
    world.close()


def data_wait(step: Callable[[Batch], None], data: ImageData) -> float:
    """The share of an epoch that rank 0 spends waiting for batches, without the first, for which nothing is loaded."""
    batches, waited = iter(data.training(1)), 0.0
    step(next(batches))
    begin = time.perf_counter()
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            return waited / (time.perf_counter() - begin)
        step(batch)


def make_data(world: World, channels_last: bool) -> ImageData:
    images = load(Path(world.contract.data_dir or ""), print)
    return ImageData(
        world, images.training, images.validation, BATCH, 1,
        mean=MEAN, deviation=DEVIATION, padding=4, mirror=True, channels_last=channels_last,
    )  # fmt: skip


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return resnet(20)


def original(world: World) -> Callable[[Batch], None]:
    model, data = make_model(), make_data(world, channels_last=False)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def step(batch: Batch) -> None:
        images, targets = data.prepare(batch, training=True)
        optimizer.zero_grad()
        cross_entropy(model(images), targets).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= world.size
        start = 0
        for gradient in gradients:
            gradient.data = flat[start : start + gradient.numel()].view_as(gradient)
            start += gradient.numel()
        optimizer.step()

    return step


def ddp(world: World, channels_last: bool) -> Callable[[Batch], None]:
    memory = torch.channels_last if channels_last else torch.contiguous_format
    model, data = DistributedDataParallel(make_model().to(memory_format=memory)), make_data(world, channels_last)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def step(batch: Batch) -> None:
        images, targets = data.prepare(batch, training=True)
        optimizer.zero_grad()
        cross_entropy(model(images), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def task(world: World, precision: str) -> Callable[[Batch], None]:
    model = make_model().to(memory_format=torch.channels_last)
    data, method, mixed = (
        make_data(world, channels_last=True),
        Bsp(),
        Precision(precision, world.device),
    )
    method.attach(world, model, lambda model: torch.optim.SGD(model.parameters(), **SGD, fused=True))

    def step(batch: Batch) -> None:
        images, targets = data.prepare(batch, training=True)
        method.begin(batch.size, batch.total)
        with mixed.autocast():
            loss = cross_entropy(model(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        method.step(SGD["lr"])

    return step


if __name__ == "__main__":
    main()
