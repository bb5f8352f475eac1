"""Bounds and defaults of a run's placement, names, sizes and price; and which engine a cluster has."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.launch import (
    Machine,
    Size,
    check_local,
    check_machine_folder,
    engine_name,
    is_machines,
    resolve,
    sizes,
)
from mlbench_cli.runs.request import Request
from providers.pins import require_pin

COMMAND = Request(name="run", workers=(2,), command="python train.py")
KIND, SLURM, HOSTS = (Cluster(name, name, details={"folder": "/f"}) for name in ("kind", "slurm", "hosts"))
SPEC = RunSpec("x-2", "local", "local", "custom", "custom", ("true",), "gloo", 2)
HERE = Machine(cores=4, gpus=2)


def one(cluster: Cluster = LOCAL, machine: Machine | None = None, **options: Any) -> RunSpec:
    here = (machine or Machine(cores=4, gpus=2)) if cluster is LOCAL else None
    (spec,) = resolve(replace(COMMAND, **options), cluster, here)
    return spec


# --- the whole spec of a command -------------------------------------------------------------------------------------


# --- placement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "gpus", "processes"),
    [
        ({}, 0, 1),
        ({"processes_per_worker": 3}, 0, 3),
        ({"gpu": True}, 1, 1),
        ({"gpu": True, "gpus_per_worker": 2, "workers": (1,)}, 2, 2),
        ({"gpu": True, "gpus_per_worker": 2, "processes_per_worker": 1, "workers": (1,)}, 2, 1),
        ({"gpu": False}, 0, 1),
    ],
)
def test_ranks_are_as_many_as_gpus_unless_their_number_is_given(
    options: dict[str, Any], gpus: int, processes: int
) -> None:
    found = one(**options)
    assert (found.gpus_per_worker, found.processes_per_worker) == (gpus, processes)


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "processes", "cpus"),
    [
        (8, None, (1, 2, 4), 1, 2.0),
        (8, None, (3,), 1, 2.0),
        (8, None, (2,), 2, 4.0),
        (1, None, (4,), 2, 2.0),  # a core for each rank at least
        (8, 3, (4,), 1, 3.0),
        (8, 3, (4,), 2, 6.0),
    ],
)
def test_the_cores_of_this_machine_are_shared_equally(
    cores: int, threads: int | None, workers: tuple[int, ...], processes: int, cpus: float
) -> None:
    asked = replace(COMMAND, workers=workers, processes_per_worker=processes)
    specs = resolve(asked, LOCAL, Machine(cores, 0, threads))
    assert {spec.cpus for spec in specs} == {cpus}


@pytest.mark.parametrize(
    ("changes", "machine", "words"),
    [
        ({"workers": 64}, HERE, None),
        ({"workers": 65}, HERE, "65 ranks on this machine of 4 cores: the local cluster allows at most 64."),
        ({"workers": 32, "processes_per_worker": 2}, HERE, None),
        ({"workers": 33, "processes_per_worker": 2}, HERE, "66 ranks"),
        ({"device": "gpu"}, HERE, None),
        ({"device": "gpu"}, Machine(4, 0), "this machine has no GPU"),
        ({"device": "gpu", "backend": "nccl"}, HERE, None),
        ({"device": "gpu", "backend": "nccl", "workers": 3}, HERE, "3 ranks, but this machine has 2."),
        ({"device": "gpu", "backend": "gloo", "workers": 3}, HERE, None),
    ],
)
def test_what_this_machine_can_run(changes: dict[str, Any], machine: Machine, words: str | None) -> None:
    spec = replace(SPEC, **changes)
    if words is None:
        check_local(spec, machine)
        return
    with pytest.raises(UsageError) as caught:
        check_local(spec, machine)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        (HOSTS, {"share_machine": True, "env": {"A": "1"}, "data_dir": "/data"}),
        (SLURM, {"image": "me/train:1", "env": {"A": "1"}, "pin": False}),
        (HOSTS, {"pin": True}),
        (LOCAL, {"pin": True, "workers": (4,)}),
    ],
)
def test_options_that_apply_are_not_refused(cluster: Cluster, options: dict[str, Any]) -> None:
    one(cluster, **options)


# --- what runs, by kind of cluster ------------------------------------------------------------------------------------

DIGITS = Request(name="run", workers=(2,), task="digits_resnet", preset="tiny")
OWN = replace(DIGITS, preset=None, command="python train.py")  # held to the goal of the task
PUBLIC = require_pin("images", "torch")


@pytest.mark.parametrize("request_", [DIGITS, OWN])
@pytest.mark.parametrize(
    ("cluster", "image", "found"),
    [
        (LOCAL, None, None),
        (HOSTS, None, None),
        (SLURM, None, None),
        (SLURM, "me/train:1", "me/train:1"),
        (KIND, None, PUBLIC),
        (KIND, "me/train:1", "me/train:1"),
    ],
)
def test_the_image_of_a_task_where_ranks_have_one(
    request_: Request, cluster: Cluster, image: str | None, found: str | None
) -> None:
    (spec,) = resolve(replace(request_, image=image), cluster, HERE if cluster is LOCAL else None)
    assert (spec.image, spec.task) == (found, "digits_resnet")
    assert spec.preset == ("open" if request_ is OWN else "tiny")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('{"a": 1}', {"a": 1}),
        ("NaN", "NaN"),  # JSON does not know it
        ("x", "x"),
        ("", ""),
        ("[1", "[1"),
        ((1, 2), [1, 2]),
    ],
)
def test_parameters_of_a_command_are_json_where_they_can_be(text: Any, value: Any) -> None:
    assert one(command="printenv MLBENCH_PARAMETERS", set={"x": text}).parameters == {"x": value}


# --- names, sizes and prices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, [("run-2", 2, 42)]),
        ({"repeat": 1, "seed": 7}, [("run-2", 2, 7)]),
        ({"seed": 0}, [("run-2", 2, 0)]),
        (
            {"repeat": 2, "workers": (2, 1)},
            [("run-2-r1", 2, 42), ("run-1-r1", 1, 42), ("run-2-r2", 2, 43), ("run-1-r2", 1, 43)],
        ),
    ],
)
def test_the_runs_of_a_request(options: dict[str, Any], found: list[tuple[str, int, int]]) -> None:
    assert sizes(replace(COMMAND, **options)) == [Size(*each) for each in found]


@pytest.mark.parametrize(("price", "per_hour"), [("0", 0.0), ("0.25", 0.5), ("999999.9", 1999999.8)])
def test_the_price_of_ones_own_machines(price: str, per_hour: float) -> None:
    assert one(worker_hour=price).price["per_hour"] == pytest.approx(per_hour)


@pytest.mark.parametrize(
    ("provider", "engine", "machines"),
    [
        ("local", "local", False),
        ("slurm", "slurm", True),
        ("hosts", "hosts", True),
        *((name, "kubernetes", False) for name in ("kind", "gke", "eks", "aks", "attached")),
    ],
)
def test_the_engine_of_a_cluster(provider: str, engine: str, machines: bool) -> None:
    cluster = Cluster("c", provider)
    assert (engine_name(cluster), is_machines(cluster)) == (engine, machines)


@pytest.mark.parametrize(("path", "normal"), [(None, None), ("/data/", "/data"), ("/a/../b", "/b")])
def test_a_folder_on_other_machines(path: str | None, normal: str | None) -> None:
    assert check_machine_folder(path) == normal


# --- backends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "backend", "on_all"),
    [
        ({"backend": "GLOO"}, "gloo", True),
        ({"backend": "grpc"}, "grpc", True),
        ({"backend": "nccl", "gpu": True}, "nccl", True),
        ({"backend": "custom:ucc.v1"}, "ucc.v1", False),
        ({"custom_backend": "ucc", "backend": "custom:ucc"}, "ucc", False),
        ({"custom_backend": "a" * 40}, "a" * 40, False),
    ],
)
def test_who_starts_the_ranks_follows_from_the_backend(options: dict[str, Any], backend: str, on_all: bool) -> None:
    found = one(**options)
    assert (found.backend, found.run_on_all) == (backend, on_all)
