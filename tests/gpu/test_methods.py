"""Methods of communication with gradients on a GPU: two ranks share it by gloo."""

import pytest
import torch

from task_images.methods import FILES
from tests.gpu.conftest import Train

SHARDED = ("fsdp2", "hsdp")


@pytest.mark.parametrize("method", sorted(set(FILES) - set(SHARDED)))
def test_a_method_trains(train: Train, method: str) -> None:
    """Also with parameter servers, which hold their numbers in host memory. What it reaches is measured on CPUs."""
    first, *others = train("mnist", ranks=2, method=method)
    assert first.result["outcome"] in ("goal_reached", "goal_missed")
    assert first.result["updates"] > 0
    assert first.result["details"]["curve"][-1]["train_loss"] < first.result["details"]["curve"][0]["train_loss"]
    assert all(one.stderr == "" or "Warning" in one.stderr for one in (first, *others))


@pytest.mark.parametrize("method", ["topk", "powersgd", "bytescheduler", "gtopk"])
def test_a_method_sums_on_a_gpu_as_on_a_cpu(train: Train, method: str) -> None:
    """Messages are as many and as large, and the first epoch ends alike."""
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu = train("mnist", ranks=2, method=method, epochs=1)[0].result
    cpu = train("mnist", ranks=2, method=method, epochs=1, device="cpu")[0].result
    for name in ("messages", "bytes"):
        assert gpu["details"]["communication"][name] == cpu["details"]["communication"][name]
    losses = [result["details"]["curve"][0]["train_loss"] for result in (gpu, cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize("method", ["fsdp2"])
def test_shards_want_nccl(train: Train, method: str) -> None:
    for one in train("mnist", ranks=2, method=method, code=64):
        assert "nccl" in one.stderr
