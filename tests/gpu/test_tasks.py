"""Every task trains on a GPU, and its result says what the GPU was, what it did, and what that took."""

import json
from pathlib import Path

import pytest
import torch

from mlbench_cli.tasks.catalog import load_catalog
from tests.contract.task_images.ranks import Parameters, Record
from tests.gpu.conftest import Train

# TensorFlow has no GPU without a build of its own; the collectives have a module of their own.
TASKS = sorted(set(load_catalog()) - {"allreduce", "cifar10_resnet20_tensorflow"})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("task", TASKS)
def test_a_task_reaches_its_goal(train: Train, tmp_path: Path, task: str, ranks: int) -> None:
    first = train(task, ranks=ranks)[0]
    assert first.result["outcome"] == "goal_reached"
    [environment] = first.events("environment")
    assert environment["device"] == "cuda:0"
    assert environment["device_name"] == torch.cuda.get_device_name()
    assert {"cuda", "cudnn", "nccl"} <= set(environment["libraries"])
    check_facts(first.result, tmp_path / "gpu" / "output-0")


def check_facts(result: Record, output: Path) -> None:
    """Device times add up to the wall time; memory and power are those of a GPU."""
    wall = result["wall_seconds"]
    assert sum(times["rank0"] for times in result["timings"].values()) == pytest.approx(wall, rel=0.02)
    details, total = result["details"], torch.cuda.get_device_properties(0).total_memory
    assert 0 < details["peak_memory_bytes"] < total
    pytest.importorskip("pynvml")
    assert 20 < details["gpu"]["power_watts"] < 1500
    assert 0 < details["gpu"]["peak_memory_bytes"] <= total
    samples = [json.loads(line) for line in (output / "gpu.jsonl").read_text().splitlines()]
    assert len(samples) >= details["gpu"]["samples"] - 1  # and one when the result was written


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("wmt16_gnmt", {"precision": "fp16"}),
        ("wmt16_gnmt", {"precision": "fp16", "loss_scale": 2.0**30, "largest_loss_scale": 2.0**30}),
        ("wmt17_transformer", {"precision": "fp16"}),
        ("wmt17_transformer", {"precision": "bf16"}),
        ("cifar10_resnet20", {"precision": "bf16", "tf32": True, "cudnn": "benchmark"}),
        ("cifar10_resnet20", {"precision": "fp16", "compile": "blocks"}),
        ("cifar10_resnet20", {"resident": True, "compile": "whole"}),
        ("cifar10_resnet20", {"resident": True, "compile": "graphs"}),
        ("cifar10_resnet20", {"precision": "fp16", "compile": "graphs"}),
        ("cifar10_resnet20_ddp", {"compile": "graphs"}),
        ("imagenet_resnet", {"precision": "bf16", "compile": "graphs"}),
        ("imagenet_resnet", {"precision": "bf16"}),
        ("gpt_pretraining", {"precision": "bf16", "compile": "blocks"}),
        ("gpt_pretraining", {"precision": "bf16", "compile": "whole"}),
        ("gpt_pretraining", {"precision": "bf16", "compile": "graphs"}),
        ("gpt_pretraining", {"precision": "bf16", "stream": "bf16", "attention": "cudnn"}),
        ("bert_pretraining", {"precision": "bf16"}),
        ("wikitext2_awd_lstm", {"tf32": True}),
    ],
    ids=str,
)
def test_an_option_reaches_the_goal_and_is_recorded(train: Train, task: str, changes: Parameters) -> None:
    [ended] = train(task, **changes)
    assert ended.result["outcome"] == "goal_reached"
    used = ended.result["details"]["options"]
    assert {name: used[name] for name in changes if name in used} == {n: v for n, v in changes.items() if n in used}
    assert ended.result["details"]["precision"] == changes.get("precision", "fp32")
    assert used.get("cuda_graphs", False) == (changes.get("compile") == "graphs")
    if "loss_scale" in changes:  # the first updates overflow, are left out, and halve the scale
        assert ended.result["details"]["updates_skipped"] > 0
        assert ended.result["details"]["loss_scale"] < 2.0**30


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("task", ["cifar10_resnet20", "cifar10_resnet20_ddp"])
def test_graphs_learn_as_single_kernels_do(train: Train, tmp_path: Path, task: str, ranks: int) -> None:
    """Two epochs, some batches of which are smaller; replayed gradients that were added to themselves would show."""
    curves = []
    for word in ("no", "graphs"):
        first = train(task, ranks=ranks, compile=word, epochs=2, goal_full=100.0, goal_light=100.0)[0]
        curves.append([(point["train_loss"], point["loss"]) for point in first.result["details"]["curve"]])
        (tmp_path / "gpu").rename(tmp_path / word)
    assert len(curves[0]) == 2
    for plain, replayed in zip(*curves, strict=True):
        assert replayed == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("task", ["wmt16_gnmt", "wmt17_transformer"])
def test_gradients_in_fp16_travel_as_such(train: Train, task: str) -> None:
    """As specified, and the goal is reached. One buffer holds them all."""
    first = train(task, ranks=2, precision="fp16")[0]
    assert first.result["outcome"] == "goal_reached"
    details = first.result["details"]
    assert details["wire"] == "fp16"
    assert details["communication"]["bytes"] == 2 * details["parameters"] * details["communication"]["messages"]


@pytest.mark.parametrize("task", ["gpt_pretraining", "cifar10_resnet20", "epsilon_logistic_regression"])
def test_speed_alone_is_measured(train: Train, task: str) -> None:
    small = {"model": "tiny", "batch_per_rank": 4, "micro_batch": 4, "sequence_length": 64}
    sizes = small if task == "gpt_pretraining" else {}
    [ended] = train(task, "throughput", **sizes)
    measured = ended.result["details"]["throughput_protocol"]
    assert len(measured["seconds"]) == 10
    if task != "epsilon_logistic_regression":
        peak = ended.result["details"]["peak_flops"]
        assert peak["measured"] > 1e12
        # The FLOP/s that matrices of random numbers reach, not more than NVIDIA states.
        assert peak["datasheet"] is None or 0.1 < peak["measured"] / peak["datasheet"] < 1.05


def test_more_ranks_than_gpus_in_one_worker_are_refused(train: Train) -> None:
    count = torch.cuda.device_count()
    [ended] = train("mnist", code=78, variables={"LOCAL_WORLD_SIZE": str(count + 1)})
    assert f"torch finds {count}" in ended.stderr
