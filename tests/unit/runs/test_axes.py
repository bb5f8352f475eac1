"""Experiments that grow along an axis: a further value of any option is added, whatever it decides of a run.

An experiment refuses runs that differ from its members in anything else, so it has to know which fields of a spec
follow from which option.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Cluster, Experiment, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.experiment import MemberRow, Plan, expand, make_plan
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.request import Request

MACHINE = Machine(cores=8, gpus=8)
FAR = Cluster(
    "far",
    "gke",
    details={
        "registry": "ghcr.io/me",
        "machine_type": "n1-standard-4",
        "functional_only": True,
        "namespace": "team",
        "gpus_per_node": 4,
        "cpus_per_node": 4,
        "plan": {"price_per_hour": 36.0, "currency": "USD"},
    },
)
CLUSTERS = {"local": LOCAL, "far": FAR}
EMPTY = Experiment("e", "demo", "2026-01-01T00:00:00.000Z", {})

COMMAND: dict[str, Any] = {"command": "printenv MLBENCH_PARAMETERS"}
DIGITS: dict[str, Any] = {"task": "digits_resnet", "preset": "tiny"}
CIFAR: dict[str, Any] = {"task": "cifar10_resnet20", "set": {"data": "synthetic"}}
ON_GPUS: dict[str, Any] = {**COMMAND, "gpu": True}

AXES: dict[str, tuple[dict[str, Any], str, tuple[Any, Any]]] = {
    "tasks": ({}, "task", ("digits_resnet", "allreduce")),
    "tasks on a cluster": ({"cluster": "far"}, "task", ("digits_resnet", "mnist")),
    "tasks with other backends": ({"set": {}}, "task", ("digits_resnet", "cifar10_resnet20_tensorflow")),
    "presets": ({"task": "digits_resnet"}, "preset", ("tiny", "throughput")),
    "parameters of a task": (DIGITS, "set.batch_size", (32, 64)),
    "parameters of a command": ({"command": "sh -c 'echo $MLBENCH_PARAMETERS'"}, "set.x", (1, 2)),
    "commands": ({}, "command", ("true", "false")),
    "backends": (COMMAND, "backend", ("gloo", "mpi")),
    "backends of one's own": (COMMAND, "custom_backend", ("one", "other")),
    "devices": (COMMAND, "gpu", (False, True)),
    "devices of a task": (DIGITS, "gpu", (False, True)),
    "goals": (DIGITS, "light", (False, True)),
    "budgets": (CIFAR, "budget", ("1h", "2h")),
    "clusters": (DIGITS, "cluster", ("local", "far")),
    "clusters and GPUs": ({**DIGITS, "gpu": True}, "cluster", ("local", "far")),
    "numbers of CPUs": (COMMAND, "num_cpus", (1, 2)),
    "processes": (COMMAND, "processes_per_worker", (1, 2)),
    "GPUs of workers": (ON_GPUS, "gpus_per_worker", (1, 2)),
    "time limits": (COMMAND, "timeout", ("1h", "2h")),
    "memory on Kubernetes": ({"cluster": "far", **DIGITS}, "memory", ("8Gi", "16Gi")),
    "images": ({"cluster": "far", **COMMAND}, "image", ("a:1", "b:1")),
}


def plan(request: Request, known: Plan | None = None) -> Plan:
    candidates = expand(request, CLUSTERS[request.cluster or "local"], MACHINE, find_cluster=CLUSTERS.__getitem__)
    made: dict[str, Run] = {run.id: run for run in (known.runs if known else ())}

    def make(spec: RunSpec) -> Run:
        run = Run(spec.name, spec, Path("nowhere"), EMPTY.created)
        made[run.id] = run
        return run

    experiment = known.experiment if known else EMPTY
    rows = [MemberRow(member, made[member.run_id], None) for member in experiment.members]
    return make_plan(experiment, rows, candidates, make)


def ask(options: dict[str, Any], **matrix: Any) -> Request:
    return Request(**{"name": "demo", "workers": (1,), **options, "matrix": matrix})


@pytest.mark.parametrize(("options", "key", "values"), AXES.values(), ids=[*AXES])
def test_a_further_value_of_an_axis_is_added_and_nothing_else_may_differ(
    options: dict[str, Any], key: str, values: tuple[Any, Any]
) -> None:
    first = plan(ask(options, **{key: values[:1]}))
    more = plan(ask(options, **{key: values}), first)
    assert (len(first.new), len(more.new), len(more.runs)) == (1, 1, 2)
    assert [member.index for member in more.experiment.members] == [0, 1]
    (one,), (other,) = first.new, more.new
    assert one.spec.content_hash != other.spec.content_hash
    with pytest.raises(UsageError, match="anonymous was"):  # which no axis decides
        plan(replace(ask(options, **{key: values[1:]}), anonymous=True), first)


@pytest.mark.parametrize(
    ("key", "values", "changed", "words"),
    [
        ("backend", ("gloo", "mpi"), {"num_cpus": 3}, "cpus was"),
        ("num_cpus", (1, 2), {"timeout": "5m"}, "timeout was"),
        ("num_cpus", (1, 2), {"processes_per_worker": 2}, "processes_per_worker was"),
        ("timeout", ("1h", "2h"), {"num_cpus": 3}, "cpus was"),
        ("command", ("true", "false"), {"backend": "mpi"}, "backend was"),
        ("custom_backend", ("one", "other"), {"num_cpus": 3}, "cpus was"),
    ],
)
def test_an_axis_decides_only_its_own_fields(
    key: str, values: tuple[Any, Any], changed: dict[str, Any], words: str
) -> None:
    options = {} if key == "command" else COMMAND
    first = plan(ask(options, **{key: values[:1]}))
    with pytest.raises(UsageError, match=words):
        plan(replace(ask(options, **{key: values[1:]}), **changed), first)
