"""Steps that are nearly all overhead, or nearly all waiting: logistic regression, and ImageNet's loaders.

    python benchmarks/steps.py

epsilon    an update of the task, one rank with one thread, 128 rows of 2 000 numbers, against the bare matrix products
           of its forward and backward pass. Budget: 3 times as long.
imagenet   the task's loader, 256 images a step, four threads, an image takes 2 ms and a step 0.4 s, as on a GPU of
           several years ago: the share of time that steps wait. Budget: 1 %.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from mlbench_cli.catalog import load_task
from task_images.contract import Contract, parse_event
from task_images.harness.distributed import open_world
from task_images.imagenet_resnet import data
from task_images.imagenet_resnet.folders import ImageFolders

ROOT = Path(__file__).parents[1]
ROWS, FEATURES, ROUNDS = 128, 2000, 5
IMAGES, BATCH, SIDE, LOADERS, STEPS = 12_800, 256, 224, 4, 12
DECODING_SECONDS, STEP_SECONDS = 0.002, 0.4


def main() -> None:
    torch.set_num_threads(1)
    own, bare = zip(*((run_epsilon(), time_products()) for _ in range(ROUNDS)), strict=True)
    ratios = [one / other for one, other in zip(own, bare, strict=True)]
    print(
        f"epsilon   update {1e3 * statistics.median(own):.2f} ms, products {1e3 * statistics.median(bare):.3f} ms"
        f" = {statistics.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f}; budget 3)"
    )
    waited, whole = wait_for_images()
    print(f"imagenet  {STEPS} steps waited {1e3 * waited:.0f} ms of {whole:.1f} s = {waited / whole:.2%} (budget 1 %)")


def run_epsilon() -> float:
    """Seconds of an update of the task."""
    parameters = load_task("epsilon_logistic_regression").resolve("throughput", {"block_updates": 200})
    given = {"MLBENCH_DEVICE": "cpu", "MLBENCH_PARAMETERS": json.dumps(parameters), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "task_images.epsilon_logistic_regression"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, check=True)
    events = (parse_event(line) for line in done.stdout.splitlines())
    [result] = [event for event in events if event and event["event"] == "result"]
    measured = result["details"]["throughput_protocol"]
    return float(measured["per_update"] / measured["summary"]["median"])


def time_products(updates: int = 2000) -> float:
    """Seconds of the products of one update, with the rows of another batch each time."""
    rows, weights, errors = torch.randn(16, ROWS, FEATURES), torch.randn(FEATURES), torch.randn(ROWS)
    begin = time.perf_counter()
    for number in range(updates):
        batch = rows[number % len(rows)]
        batch @ weights
        batch.T @ errors
    return (time.perf_counter() - begin) / updates


def wait_for_images() -> tuple[float, float]:
    """Seconds that steps waited, and of all steps. The first batch, which nothing could be decoded before, is left
    out."""
    image = np.zeros((SIDE, SIDE, 3), np.uint8)

    def decode(*_: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
        time.sleep(DECODING_SECONDS)
        return image

    setattr(data, "training_crop", decode)  # noqa: B010
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

    def open(self, index: int) -> int:
        return index


if __name__ == "__main__":
    main()
