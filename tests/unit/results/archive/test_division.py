"""Which results are closed, which open, and which neither."""

from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import DataIdentityDocument
from mlbench_cli.results.archive.judge import Division, find_division
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import find_rules

OFFICIAL: DataIdentityDocument = {"counts": {"images": 60000}, "digest": "sha256:0", "official": True, "reason": None}


def judge_division(
    run_spec: RunSpec, synthetic: bool = False, data: DataIdentityDocument | None = OFFICIAL
) -> Division:
    return find_division(run_spec, find_rules(run_spec.task, run_spec.preset), synthetic, data)


def spec(cluster: Cluster = LOCAL, **options: Any) -> RunSpec:
    return resolve(Request(name="x", workers=(2,), **{"task": "cifar10_resnet20", **options}), cluster)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"light": True, "seed": 7, "backend": "mpi", "budget": "2h", "num_cpus": 3},
        {"set": {"loaders": 4, "channels_last": False, "compile": "blocks"}},
        {"cluster": Cluster("far", "kind"), "registry": "ghcr.io:443/me"},
    ],
)
def test_the_tasks_own_program_as_specified_is_closed(options: dict[str, Any]) -> None:
    assert judge_division(spec(**options)).to_dict() == {"word": "closed", "reason": None}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"set": {"learning_rate": 0.5}}, "learning_rate 0.5 instead of 0.02"),
        ({"set": {"depth": 56, "precision": "bf16"}}, "depth 56 instead of 20, precision bf16 instead of fp32"),
        ({"preset": "legacy"}, "preset legacy"),
        ({"preset": "legacy", "set": {"epochs": 9}}, "preset legacy, epochs 9 instead of 164"),
        ({"command": "python mine.py"}, "a command of one's own"),
        ({"on_failure": "restart"}, "failed ranks were started again"),
        ({"cluster": Cluster("far", "kind"), "image": "me/mine:1"}, "image me/mine:1"),
    ],
)
def test_what_was_changed_is_open_and_told(options: dict[str, Any], reason: str) -> None:
    assert judge_division(spec(**options)).to_dict() == {"word": "open", "reason": reason}


@pytest.mark.parametrize(
    ("given", "synthetic", "reason"),
    [
        (spec(set={"goal_full": 10}), False, "the goal was changed: goal_full 10.0 instead of 80.0"),
        (spec(set={"goal_on": "training"}), False, "the goal was changed: goal_on training instead of validation"),
        (spec(set={"data": "synthetic"}), True, "the data are synthetic"),
        (spec(task="allreduce"), False, "the task has no goal"),
        (spec(task=None, command="true"), False, "a command without a task's goal"),
        (replace(spec(), task="of-tomorrow"), False, "a task that this mlbench does not know"),
    ],
)
def test_what_can_be_held_against_nothing_has_no_division(given: RunSpec, synthetic: bool, reason: str) -> None:
    assert judge_division(given, synthetic).to_dict() == {"word": None, "reason": reason}


def test_a_part_of_the_data_has_no_division_and_unknown_data_are_open() -> None:
    part: DataIdentityDocument = {**OFFICIAL, "official": False, "reason": "a part of the official data: 1280 images"}
    unknown: DataIdentityDocument = {**OFFICIAL, "official": None, "reason": "nobody can tell"}
    assert judge_division(spec(), data=part) == Division(None, "a part of the official data: 1280 images")
    assert judge_division(spec(), data=unknown) == Division("open", "data not known to be official (nobody can tell)")
    assert judge_division(spec(), data=None) == Division("open", "data not known to be official")
    assert judge_division(spec(command="python mine.py"), data=None).word == "open"
