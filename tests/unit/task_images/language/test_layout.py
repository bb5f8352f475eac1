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
        ("ddp", 4, (), (4, 1)),
        ("fsdp2", 4, (), (1, 4)),
        ("hsdp", 4, (), (2, 2)),
        ("hsdp", 8, (4,), (4, 2)),
        ("hsdp", 64, (0, 8), (8, 8)),
        ("hsdp", 8, (0, 8), (2, 4)),
    ],
)
def test_the_mesh_of_a_parallelism(name: str, ranks: int, sizes: tuple[int, ...], mesh: tuple[int, int]) -> None:
    layout = plan_layout(name, ranks, *sizes)
    assert (layout.replicas, layout.shards) == mesh
    assert (layout.ranks, layout.is_sharded) == (ranks, name != "ddp")


@pytest.mark.parametrize(
    ("name", "ranks", "replicas", "words"),
    [
        ("hsdp", 3, 0, "replicas=2 does not fit 3 ranks"),
        ("ddp", 4, 2, "replicas=2 has no effect"),
        ("zero9", 4, 0, "not one of"),
    ],
)
def test_a_mesh_that_does_not_fit_says_what_to_change(name: str, ranks: int, replicas: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        plan_layout(name, ranks, replicas)
    assert "--set" in str(caught.value.hint)


def test_passes_fill_the_global_batch_exactly() -> None:
    assert plan_accumulation(plan_layout("ddp", 4), 32, 2) == 4
    assert plan_accumulation(plan_layout("ddp", 4), 32, 0) == 1
    with pytest.raises(LayoutError, match="32 sequences cannot be split") as caught:
        plan_accumulation(plan_layout("ddp", 3), 32, 2)
    assert "global_batch=30" in str(caught.value.hint)


def parameters(preset: str, **changes: Any) -> Mapping[str, Any]:
    return load_task("gpt_pretraining").resolve(preset, changes)


@pytest.mark.parametrize(
    ("preset", "ranks", "changes", "words"),
    [
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
