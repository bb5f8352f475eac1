"""Collectives of tensors on a GPU."""

from task_images.allreduce.operations import COLLECTIVES
from tests.contract.task_images.ranks import Record
from tests.gpu.conftest import Train

SIZES = {"min_exponent": 0, "max_exponent": 5, "count": 4, "samples": 5, "warmup": 1, "collectives": list(COLLECTIVES)}


def series(result: Record) -> set[str]:
    return {one["collective"] for one in result["details"]["series"]}


def test_nccl_with_one_rank(train: Train) -> None:
    result = train("allreduce", dtypes=["fp32", "fp16", "bf16", "int32"], **SIZES)[0].result
    assert {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"} <= series(result)
    backend = result["details"]["backend"]
    assert backend["version"].startswith("2.")
    assert backend["network"]
    assert backend["interfaces"].startswith("[0]")


def test_gloo_with_two_ranks(train: Train) -> None:
    """Messages between two ranks are not for GPU tensors, and would end the process."""
    result = train("allreduce", ranks=2, dtypes=["fp32"], **SIZES)[0].result
    refused = {one["series"].partition(",")[0]: one["why"] for one in result["details"]["not_supported"]}
    assert set(refused) >= {"ping_pong", "bidirectional"}
    assert all("GPU" in why for name, why in refused.items() if name in ("ping_pong", "bidirectional"))
    assert {"all_reduce", "broadcast", "all_gather"} <= series(result)
