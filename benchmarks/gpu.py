"""What one NVIDIA GPU does: updates of every training task by the throughput protocol, and against a plain loop.

    python benchmarks/gpu.py [TASK ...]

Each line is a run of the task itself, one rank, with the preset `throughput` and the changes named. Samples are images,
sentences or windows of tokens; MFU is the share of the datasheet's dense rate (of the measured one for fp32), FLOPs as
`mlbench tasks` documents them. Waits of the host for the GPU are not counted here: tests/gpu does.

Last, the decoder's and ResNet-20's updates against the same model in a loop as one writes it in torch, in turn, with
the data in memory already. Budget: the task takes no longer, 1.0 each.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mlbench_cli.catalog import load_task
from task_images.contract import parse_event
from task_images.gpt_pretraining.model import Decoder, initial_deviation
from task_images.gpt_pretraining.shapes import SHAPES
from task_images.harness.language.parallel import fill_parameters
from task_images.harness.models.resnet import resnet
from task_images.harness.precision import set_arithmetic
from task_images.harness.settings import CudaSettings

ROOT = Path(__file__).parents[1]
GPU = torch.device("cuda")
Changes = Mapping[str, Any]
Result = Mapping[str, Any]
RUNS: tuple[tuple[str, Changes], ...] = (
    ("gpt_pretraining", {}),
    ("gpt_pretraining", {"compile": True}),
    ("gpt_pretraining", {"compile": True, "loss_chunk": 4096}),
    ("bert_pretraining", {"precision": "bf16"}),
    ("imagenet_resnet", {"batch_size": 256}),
    ("imagenet_resnet", {"batch_size": 256, "precision": "bf16"}),
    ("imagenet_resnet", {"batch_size": 256, "precision": "bf16", "compile": "blocks"}),
    ("cifar10_resnet20", {}),
    ("cifar10_resnet20", {"resident": True}),
    ("cifar10_resnet20", {"resident": True, "compile": "whole", "precision": "bf16"}),
    ("cifar10_resnet20", {"resident": True, "compile": "graphs"}),
    ("wikitext2_awd_lstm", {}),
    ("wmt16_gnmt", {}),
    ("wmt17_transformer", {}),
    ("epsilon_logistic_regression", {}),
)
ROUNDS, WARMUP, UPDATES = 3, 20, 50
Step = Callable[[], None]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("torch finds no NVIDIA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    asked = sys.argv[1:] or [task for task, _ in RUNS]
    print(f"{'task and changes':<72} {'samples/s':>10} {'ms/update':>9} {'MFU':>6} {'GB':>6} {'W':>5}")
    for task, changes in RUNS:
        if task in asked:
            print(describe(task, changes), flush=True)
    for name, task, changes, make in (
        ("decoder of 124 M, bf16", "gpt_pretraining", {"clip": 1.0}, plain_decoder),
        ("the same, compiled", "gpt_pretraining", {"clip": 1.0, "compile": True}, compiled_decoder),
        ("ResNet-20, 128 images", "cifar10_resnet20", {"resident": True, "cudnn": "default"}, plain_resnet),
    ):
        if task in asked:
            compare(name, task, changes, make)


def describe(task: str, changes: Changes) -> str:
    """One line of the table."""
    result = run(task, changes)
    details = result["details"]
    found = details["throughput_protocol"]
    rate, per_update = found["summary"]["median"], found["per_update"]
    share = details.get("mfu", details.get("mfu_of_measured_peak"))
    power = details.get("gpu", {}).get("power_watts")
    named = f"{task} " + " ".join(f"{name}={value}" for name, value in changes.items())
    return (
        f"{named:<72} {rate:10.1f} {1e3 * per_update / rate:9.2f} {_show(share, '6.1%')}"
        f" {found['peak_memory_bytes'] / 1e9:6.1f} {_show(power, '5.0f')}"
    )


def run(task: str, changes: Changes) -> Result:
    """The result of one run of the task with its preset `throughput`."""
    given = {
        "MLBENCH_DEVICE": "gpu",
        "MLBENCH_BACKEND": "nccl",
        "MLBENCH_PARAMETERS": json.dumps(load_task(task).resolve("throughput", changes)),
    }
    command = [sys.executable, "-m", f"task_images.{task}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr)
    events = (parse_event(line) for line in done.stdout.splitlines())
    [result] = [event for event in events if event and event["event"] == "result"]
    return result


def compare(name: str, task: str, changes: Changes, make: Callable[[], Step]) -> None:
    """Print how many times as fast the task is as the plain loop, least and most of all rounds."""
    ratios, both = [], []
    for _ in range(ROUNDS):
        protocol = run(task, changes)["details"]["throughput_protocol"]
        own = protocol["per_update"] / protocol["summary"]["median"]
        plain = time_step(make())
        torch.cuda.empty_cache()
        ratios.append(plain / own)
        both.append((own, plain))
    own, plain = (statistics.median(values) for values in zip(*both, strict=True))
    print(
        f"{name:<26} task {1e3 * own:7.2f} ms, plain loop {1e3 * plain:7.2f} ms: {statistics.median(ratios):.2f} times"
        f" as fast ({min(ratios):.2f} to {max(ratios):.2f}; budget 1.0)",
        flush=True,
    )


def time_step(step: Step) -> float:
    """Seconds of an update."""
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(UPDATES):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / UPDATES


def plain_decoder(*, compiled: bool = False) -> Step:
    """Windows of tokens that are on the GPU; autocast, clipped gradients, torch's fused AdamW."""
    torch.manual_seed(0)
    shape = SHAPES["124M"]
    model = Decoder(shape).to(GPU)
    fill_parameters(model, lambda name: initial_deviation(name, shape), seed=0)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    windows = torch.randint(shape.vocabulary, (16, 12, 1025), device=GPU)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        window = windows[number % len(windows)]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(window[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled_decoder() -> Step:
    """The same, compiled as a whole."""
    return plain_decoder(compiled=True)


def plain_resnet() -> Step:
    """Images that are on the GPU and stay as they are; SGD with momentum, fused."""
    torch.manual_seed(0)
    set_arithmetic(CudaSettings())
    model = resnet(20).to(GPU).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    images = torch.randn(16, 128, 3, 32, 32, device=GPU).contiguous()
    labels = torch.randint(10, (16, 128), device=GPU)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        place = number % len(images)
        cross_entropy(model(images[place].to(memory_format=torch.channels_last)), labels[place]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _show(value: float | None, form: str) -> str:
    return " " * (int(form.split(".")[0]) - 1) + "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
