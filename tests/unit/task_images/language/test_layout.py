"""Meshes and batches, from numbers alone."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.gpt_pretraining.plan import make_plan
from task_images.language.layout import LayoutError, plan_accumulation, plan_layout


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "mesh"),
    [
        ("ddp", 4, (0, 0), (4, 1, 1)),
        ("fsdp2", 4, (0, 0), (1, 4, 1)),
        ("hsdp", 4, (0, 0), (2, 2, 1)),
        ("hsdp", 8, (0, 4), (4, 2, 1)),
        ("hsdp", 64, (0, 0, 8), (8, 8, 1)),
        ("hsdp", 8, (0, 0, 8), (2, 4, 1)),
        ("tp", 4, (0, 0), (1, 1, 4)),
        ("tp+fsdp2", 4, (0, 0), (1, 2, 2)),
        ("tp+fsdp2", 16, (8, 0), (1, 2, 8)),
    ],
)
def test_the_mesh_of_a_parallelism(name: str, ranks: int, sizes: tuple[int, int], mesh: tuple[int, int, int]) -> None:
    layout = plan_layout(name, ranks, *sizes)
    assert (layout.replicas, layout.shards, layout.tensor) == mesh
    parts = [layout.data_rank(rank) for rank in range(ranks)]
    assert sorted(set(parts)) == list(range(layout.data))
    assert all(parts.count(part) == layout.tensor for part in parts)


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "words"),
    [
        ("hsdp", 3, (0, 0), "replicas=2 does not fit 3 ranks"),
        ("tp+fsdp2", 3, (0, 0), "tensor_parallel=2 does not fit 3 ranks"),
        ("tp", 4, (2, 0), "leaves 2 groups of 4 ranks"),
        ("fsdp2", 4, (2, 0), "no effect with parallel=fsdp2"),
        ("ddp", 4, (0, 2), "replicas=2 has no effect"),
        ("zero9", 4, (0, 0), "not one of"),
    ],
)
def test_a_mesh_that_does_not_fit_says_what_to_change(
    name: str, ranks: int, sizes: tuple[int, int], words: str
) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        plan_layout(name, ranks, *sizes)
    assert "--set" in caught.value.hint


def test_passes_fill_the_global_batch_exactly() -> None:
    assert plan_accumulation(plan_layout("ddp", 4), 32, 2) == 4
    assert plan_accumulation(plan_layout("tp", 4), 32, 8) == 4
    assert plan_accumulation(plan_layout("ddp", 4), 32, 0) == 1
    with pytest.raises(LayoutError, match="32 sequences cannot be split") as caught:
        plan_accumulation(plan_layout("ddp", 3), 32, 2)
    assert "global_batch=30" in caught.value.hint


def parameters(preset: str, **changes: Any) -> Mapping[str, Any]:
    return load_task("gpt_pretraining").resolve(preset, changes)


@pytest.mark.parametrize(
    ("preset", "ranks", "changes", "words"),
    [
        ("8B", 16, {"parallel": "tp"}, "kv_heads is 8"),
        ("tiny", 2, {"parallel": "tp", "sequence_length": 63}, "sequence_length is 63"),
        ("124M", 2, {"parallel": "tp"}, "learned positions"),
        ("124M", 1, {"sequence_length": 2048}, "has 1024 positions"),
        ("tiny", 1, {"vocabulary": 100}, "vocabulary of 256"),
    ],
)
def test_sizes_that_do_not_go_together(preset: str, ranks: int, changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        make_plan(parameters(preset, **changes), ranks)


def test_the_checks_need_no_framework() -> None:
    code = "import task_images.gpt_pretraining.plan, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
