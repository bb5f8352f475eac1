"""A task refuses a run before it starts, with the numbers."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.preflight import find_too_many_workers
from mlbench_cli.runs.request import Request

LOCAL = Cluster("local", "local")
REMOTE = Cluster("far", "attached", details={"registry": "ghcr.io/me"})
MACHINE = Machine(cores=8, gpus=0)


def request(preset: str, *workers: int, **changes: Any) -> Request:
    return Request(name="x", workers=workers or (1,), task="gpt_pretraining", preset=preset, set=changes)


def test_a_batch_that_does_not_fit_the_workers_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"x-3: a global batch of 32 sequences cannot be split") as caught:
        resolve(request("tiny", 4, 3), LOCAL, MACHINE)
    assert caught.value.exit_code == 2
    assert "--set global_batch=30" in str(caught.value.hint)


def test_more_ranks_than_a_task_can_use_are_found_unless_speed_is_measured() -> None:
    asked = Request(name="x", workers=(32, 64), task="wikitext2_awd_lstm")
    [(rule, names)] = find_too_many_workers(resolve(asked, REMOTE)).items()
    assert (rule.sensible, names) == (32, ["x-64"])
    assert not find_too_many_workers(resolve(replace(asked, preset="throughput"), REMOTE))
    dense = replace(asked, workers=(16, 17), processes_per_worker=2)
    assert [*find_too_many_workers(resolve(dense, REMOTE)).values()] == [["x-17"]]
    assert not find_too_many_workers(resolve(Request(name="y", workers=(64,), command="true", image="a:1"), REMOTE))


def test_a_checkpoint_that_is_not_here_is_refused_before_anything_starts(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoint.pt"
    asked = Request(name="x", workers=(2,), task="cifar10_resnet20", preset="tiny", set={"resume": str(kept)})
    with pytest.raises(NotFoundError, match=r'x-2: the checkpoint ".*checkpoint.pt" does not exist'):
        resolve(asked, LOCAL, MACHINE)
    assert resolve(asked, REMOTE)  # who knows what is in a volume?
    kept.touch()
    assert resolve(asked, LOCAL, MACHINE)
