"""Steps that are nearly all overhead, or nearly all waiting: logistic regression, and ImageNet's loaders.

    python benchmarks/steps.py

epsilon    an update of the task, one rank with one thread (and one that gathers rows ahead, as by default), 128 rows of
           2 000 numbers, against the bare matrix products of its forward and backward pass. Budget: 3 times as long.
           Once by the clock, and once by the CPU time of the training thread, which says less of other programs; that
           one by the tracker's sections, too.
bound      what no update with this loader can be faster than: a loop of two products, the sigmoid and the update of
           the weights on the same batches, without losses, tracker, schedule, reports or a guard; on two ranks with a
           bare all-reduce of the 8 kB, too. The products alone are measured on 16 batches that stay in the cache; the
           rows of a training come from memory, by another core.
imagenet   the task's loader, 256 images a step, four threads, an image takes 2 ms and a step 0.4 s, as on a GPU of
           several years ago: the share of time that steps wait. Budget: 1 %.
"""

import contextlib
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import _ranks
import numpy as np
import torch
import torch.distributed as dist

from mlbench_cli.tasks.catalog import load_task
from task_images import train
from task_images.clock import Tracker
from task_images.contract import Contract, parse_event
from task_images.data import ArrayData
from task_images.epsilon_logistic_regression.data import generate
from task_images.epsilon_logistic_regression.task import main as train_epsilon
from task_images.imagenet_resnet import data
from task_images.imagenet_resnet.folders import ImageFolders
from task_images.world import open_world

ROWS, FEATURES, ROUNDS = 128, 2000, 5
TRAINING_ROWS, EPOCHS = 12_800, 11  # as many as the task's preset has of a rank
IMAGES, BATCH, SIDE, LOADERS, STEPS = 12_800, 256, 224, 4, 12
DECODING_SECONDS, STEP_SECONDS = 0.002, 0.4


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # a task that runs in this process looks there
    torch.set_num_threads(1)
    if _ranks.is_rank():
        loop_barely()
        return
    own, bare, alone = zip(*((run_epsilon(1), time_products(), run_bare_loop(1)) for _ in range(ROUNDS)), strict=True)
    ratios = [one / other for one, other in zip(own, bare, strict=True)]
    print(
        f"epsilon   update {1e3 * statistics.median(own):.2f} ms, products {1e3 * statistics.median(bare):.3f} ms"
        f" = {statistics.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f}; budget 3)"
    )
    print_bound("one rank ", own, alone)
    print_bound("two ranks", *zip(*((run_epsilon(2), run_bare_loop(2)) for _ in range(ROUNDS)), strict=True))
    sections, cpu = count_sections(), time_products(clock=time.thread_time)
    total = sum(sections.values())
    parts = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in sections.items() if seconds)
    print(
        f"          training thread {1e6 * total:.0f} us of CPU, products {1e6 * cpu:.0f} us = {total / cpu:.1f} times"
    )
    print(f"          of it {parts}")
    waited, whole = wait_for_images()
    print(f"imagenet  {STEPS} steps waited {1e3 * waited:.0f} ms of {whole:.1f} s = {waited / whole:.2%} (budget 1 %)")


def configure_epsilon() -> dict[str, str]:
    """The variables of a run for speed alone."""
    parameters = load_task("epsilon_logistic_regression").resolve("throughput", {"block_updates": 200})
    return {"MLBENCH_DEVICE": "cpu", "MLBENCH_PARAMETERS": json.dumps(parameters), "OMP_NUM_THREADS": "1"}


def print_bound(title: str, own: Sequence[float], alone: Sequence[float]) -> None:
    ratios = [one / other for one, other in zip(own, alone, strict=True)]
    update, bare = (1e3 * statistics.median(seconds) for seconds in (own, alone))
    found = f"{statistics.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f})"
    print(f"bound     {title}: update {update:.2f} ms, bare loop {bare:.2f} ms = {found}")


def run_epsilon(ranks: int) -> float:
    """Seconds of an update of the task."""
    output = run_ranks([sys.executable, "-m", "task_images.run", "epsilon_logistic_regression"], ranks)
    measured = find_result(output)["details"]["throughput_protocol"]
    return float(measured["per_update"] / measured["summary"]["median"])


def run_bare_loop(ranks: int) -> float:
    """Seconds of an update of `loop_barely`."""
    lines = run_ranks([sys.executable, __file__], ranks).splitlines()
    return next(float(line) for line in lines if parse_event(line) is None)


def run_ranks(command: list[str], ranks: int) -> str:
    """What rank 0 of a program prints."""
    return _ranks.read(command, ranks, {**configure_epsilon(), "MLBENCH_BACKEND": "gloo"})


@torch.no_grad()
def loop_barely() -> None:
    """As one rank, train by what an update cannot do without, and print the seconds that one takes."""
    world = open_world(Contract())
    rows = generate(TRAINING_ROWS * world.size, 42, "training")
    batches, weights = ArrayData(world, rows, rows, ROWS, 42, loaders=1), torch.zeros(FEATURES)
    updates, begin = 0, 0.0
    for epoch in range(1, 1 + EPOCHS):
        if epoch == 2:  # the first one is the warm-up
            world.barrier()
            updates, begin = 0, time.perf_counter()
        for batch in batches.training(epoch):
            errors = torch.sigmoid(batch.inputs.mv(weights)).sub_(batch.targets)
            gradient = batch.inputs.t().mv(errors)
            if world.size > 1:
                dist.all_reduce(gradient)
            weights.sub_(gradient, alpha=0.01 / batch.total)
            updates += 1
    seconds = (time.perf_counter() - begin) / updates
    if world.is_first:
        print(seconds)
    world.close()


def count_sections() -> dict[str, float]:
    """CPU seconds of an update in the training thread, by section of the tracker. The task runs in this process."""
    out = io.StringIO()
    setattr(train, "Tracker", lambda device: Tracker(clock=time.thread_time))  # noqa: B010
    with contextlib.redirect_stdout(out):
        train_epsilon(Contract(configure_epsilon()))
    result = find_result(out.getvalue())
    return {name: times["rank0"] / result["updates"] for name, times in result["timings"].items()}


def find_result(output: str) -> Any:
    """The result event in a task's output."""
    events = (parse_event(line) for line in output.splitlines())
    return next(event for event in events if event and event["event"] == "result")


def time_products(updates: int = 2000, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the products of one update, with the rows of another batch each time."""
    rows, weights, errors = torch.randn(16, ROWS, FEATURES), torch.randn(FEATURES), torch.randn(ROWS)
    begin = clock()
    for number in range(updates):
        batch = rows[number % len(rows)]
        batch @ weights
        batch.T @ errors
    return (clock() - begin) / updates


def wait_for_images() -> tuple[float, float]:
    """Seconds that steps waited, and of all steps. The first batch, which nothing could be decoded before, is left
    out."""
    image = np.zeros((SIDE, SIDE, 3), np.uint8)

    def decode(*_: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
        time.sleep(DECODING_SECONDS)
        return image

    setattr(data, "crop_for_training", decode)  # noqa: B010
    part = Part()
    images = cast(ImageFolders, SimpleNamespace(training=part, validation=part))
    loader = data.FileData(
        open_world(Contract({})), images, BATCH, 42, side=SIDE, shorter=SIDE, least_crop=0.08, loaders=LOADERS,
        draft=True, channels_last=True,
    )  # fmt: skip
    batches = loader.training(1)
    next(batches)
    waited, begin = 0.0, time.perf_counter()
    for _ in range(STEPS):
        time.sleep(STEP_SECONDS)
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
    return waited, time.perf_counter() - begin


class Part:
    """Images that are not there."""

    labels = np.zeros(IMAGES, np.int64)

    def __len__(self) -> int:
        return IMAGES

    def path(self, index: int) -> int:
        return index


if __name__ == "__main__":
    main()
