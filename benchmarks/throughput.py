"""Images per second of 1b on fake data (no loading), one rank, and the share of what the device can do at its best.

The task itself runs, as `mlbench run NAME 1 --task imagenet_resnet --preset throughput` would run it, on the GPU where
there is one and else on the CPU, with options in turn. Peak: the fastest product of square matrices in the same format,
measured here; share: floating-point operations of forward and backward pass, counted by torch, over peak. No budget.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from task_images.contract import parse_event
from task_images.models.imagenet import imagenet_model

ROOT = Path(__file__).parents[1]
MODEL, SIDE = "resnet50", 224
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Device:
    name: str  # as in the contract
    torch: torch.device
    side: int  # of the matrices
    batch: int
    steps: int
    epochs: int
    options: tuple[dict[str, object], ...]


CPU = Device(
    "cpu", torch.device("cpu"), 2048, 4, 2, 3,
    ({"channels_last": False}, {}, {"precision": "bf16"}),
)  # fmt: skip
GPU = Device(
    "gpu", torch.device("cuda"), 8192, 128, 20, 6,
    ({"channels_last": False}, {}, {"precision": "bf16"}, {"precision": "bf16", "compile": "blocks"}),
)  # fmt: skip


def main() -> None:
    device = GPU if torch.cuda.is_available() else CPU
    named = torch.cuda.get_device_name() if device is GPU else f"{torch.get_num_threads()} threads"
    work = operations()
    print(f"{MODEL} on {device.name} ({named}), batch {device.batch}: {work / 1e9:.1f} GFLOP an image")
    peaks = {name: peak(device, kind) for name, kind in FORMATS.items()}
    for options in device.options:
        rate = run(device, options)
        best = peaks[str(options.get("precision", "fp32"))]
        ways = ", ".join(f"{name}={value}" for name, value in options.items()) or "as the task runs"
        print(
            f"{ways:<30} {rate:8.1f} img/s  {rate * work / 1e12:8.2f} of {best / 1e12:.2f} TFLOP/s"
            f"  = {rate * work / best:.0%}",
            flush=True,
        )


def operations() -> float:
    """Floating-point operations of one image's forward and backward pass; a multiplication and an addition are two."""
    with torch.device("meta"):
        model, images = imagenet_model(MODEL), torch.randn(1, 3, SIDE, SIDE)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return float(counter.get_total_flops())


def peak(device: Device, kind: torch.dtype, rounds: int = 12) -> float:
    """Floating-point operations per second of the fastest of some matrix products."""
    left, right = (torch.randn(device.side, device.side, device=device.torch).to(kind) for _ in range(2))
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        left @ right
        if device is GPU:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * device.side**3 / best


def run(device: Device, options: dict[str, object]) -> float:
    """Images per second in a run of the task: the median over epochs but the first."""
    sizes = {"batch_size": device.batch, "steps": device.steps, "epochs": device.epochs, "model": MODEL, "side": SIDE}
    parameters = {"data": "fake", "warmup_epochs": 0.0, "learning_rate": 0.01, **sizes, **options}
    given = {"MLBENCH_DEVICE": device.name, "MLBENCH_PARAMETERS": json.dumps(parameters)}
    command = [sys.executable, "-m", "task_images.imagenet_resnet"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    events = (parse_event(line) for line in done.stdout.splitlines())
    [result] = [event for event in events if event and event["event"] == "result"]
    return float(result["details"]["throughput"]["samples_per_second"])


if __name__ == "__main__":
    main()
