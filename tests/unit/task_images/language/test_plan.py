"""Batches, from numbers alone."""

import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.gpt_pretraining.plan import make_plan
from task_images.language.plan import PlanError
from task_images.language.pretraining import Pretraining


def parameters(preset: str = "tiny", **changes: Any) -> Mapping[str, Any]:
    return load_task("gpt_pretraining").resolve(preset, changes)


def test_passes_fill_the_global_batch_exactly() -> None:
    assert make_plan(parameters(micro_batch=2), 4).passes == 4
    assert make_plan(parameters(micro_batch=0), 4).passes == 1
    with pytest.raises(PlanError, match="32 sequences cannot be split") as caught:
        make_plan(parameters(micro_batch=2), 3)
    assert "global_batch=30" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        ("124M", {"sequence_length": 2048}, "has 1024 positions"),
        ("tiny", {"vocabulary": 100}, "vocabulary of 256"),
    ],
)
def test_sizes_that_do_not_go_together(preset: str, changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_plan(parameters(preset, **changes), 1)


def test_the_checks_need_no_framework() -> None:
    code = "import task_images.gpt_pretraining.plan, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_resumed_run_goes_on_with_the_next_update_and_each_pass_has_a_number() -> None:
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(passes=2, global_batch=16),
        settings=SimpleNamespace(steps=5),
        world=SimpleNamespace(rank=3),
        training=lambda update: (SimpleNamespace(terms=8.0, name=(update, number)) for number in range(2)),
        _make_ahead=lambda passes: passes,
    )
    found = [(one.first, [part.name for part in one.passes]) for one in Pretraining.updates(run, 1, 3)]
    assert found == [(6, [(3, 0), (3, 1)]), (6, [(4, 0), (4, 1)])]  # the last two of eight passes
