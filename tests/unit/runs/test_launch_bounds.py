"""Bounds and defaults of a run's placement, names, sizes and price; and which engine a cluster has."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.launch import (
    Machine,
    Size,
    check_local,
    check_machine_folder,
    check_names,
    engine_name,
    is_machines,
    resolve,
    sizes,
)
from mlbench_cli.runs.request import Request

COMMAND = Request(name="run", workers=(2,), command="python train.py")
KIND, SLURM, HOSTS = (Cluster(name, name, details={"folder": "/f"}) for name in ("kind", "slurm", "hosts"))
IMAGE: dict[str, Any] = {"image": "me/train:1"}
SPEC = RunSpec("x-2", "local", "local", "custom", "custom", ("true",), "gloo", 2)
HERE = Machine(cores=4, gpus=2)


def one(cluster: Cluster = LOCAL, machine: Machine | None = None, **options: Any) -> RunSpec:
    here = (machine or Machine(cores=4, gpus=2)) if cluster is LOCAL else None
    (spec,) = resolve(replace(COMMAND, **options), cluster, here)
    return spec


def refusal(cluster: Cluster = LOCAL, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        one(cluster, **options)
    return caught.value


# --- the whole spec of a command -------------------------------------------------------------------------------------


def test_a_plain_command_on_this_machine() -> None:
    assert one() == RunSpec(
        *("run-2", "local", "local", "custom", "custom", ("python", "train.py"), "gloo", 2),
        cpus=2.0,
        cluster_kind="local",
    )


def test_a_command_with_everything_that_can_be_said_on_this_machine() -> None:
    found = one(
        gpu=True,
        gpus_per_worker=1,
        processes_per_worker=1,
        num_cpus=3,
        seed=7,
        timeout="90s",
        anonymous=True,
        share_machine=True,
        pin=True,
        calibrate=True,
        light=True,
        backend="nccl",
        worker_hour="0.5",
        set={"a": "1", "b": "x", "c": '"1"', "d": "[1, {}]", "e": "NaN", "f": 2},
    )
    assert found == RunSpec(
        *("run-2", "local", "local", "custom", "custom", ("python", "train.py"), "nccl", 2),
        device="gpu",
        gpus_per_worker=1,
        cpus=3.0,
        seed=7,
        timeout=90.0,
        anonymous=True,
        share_machine=True,
        pin=True,
        calibrate=True,
        goal="light",
        price={
            "currency": "USD",
            "source": "named by the user (--worker-hour)",
            "table": None,
            "per_hour": 1.0,
        },
        parameters={"a": 1, "b": "x", "c": "1", "d": [1, {}], "e": "NaN", "f": 2},
        cluster_kind="local",
    )


def test_a_command_on_a_cluster_whose_timings_mean_nothing() -> None:
    plan = {"price_per_hour": 3.5, "currency": "EUR", "price_source": "a table", "price_table": "7", "warnings": []}
    details = {"functional_only": True, "machine_type": "n1-standard-4", "plan": plan}
    found = one(Cluster("far", "gke", details=details), **IMAGE)
    assert (found.engine, found.cluster, found.cluster_kind) == ("kubernetes", "far", "gke/n1-standard-4")
    assert found.functional_only == "all nodes of the cluster are containers on one machine"
    assert found.price == {"per_hour": 3.5, "currency": "EUR", "source": "a table", "table": "7"}
    assert (found.cpus, found.image, found.data_dir) == (None, "me/train:1", None)


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
    ("cluster", "options", "words"),
    [
        (KIND, {}, "--image is missing: your own command needs one on a cluster."),
        (HOSTS, IMAGE, "--image does not apply to hosts"),
        (SLURM, {"memory": "8Gi"}, "--memory does not apply on slurm."),
        (HOSTS, {"queue": "q"}, "--queue does not apply on hosts."),
        (SLURM, {"share_machine": True}, "--share-machine does not apply to Slurm"),
        (KIND, {"share_machine": False, **IMAGE}, "--share-machine applies only to this machine and hosts."),
        (SLURM, {"data_dir": "data"}, '--data-dir "data": on other machines the path must be absolute.'),
        (LOCAL, {"image": "x"}, "--image does not apply to the local cluster"),
        (LOCAL, {"toleration": ("a",)}, "--toleration does not apply on the local cluster."),
        (LOCAL, {"command": None}, "--task, or --command is missing"),
        (KIND, {"command": None, **IMAGE}, "--command for the image is missing"),
        (LOCAL, {"budget": "2h"}, "--budget works only with tasks"),
        (LOCAL, {"pin": True, "workers": (5,)}, "--pin: 5 processes need one CPU each, but this machine has 4."),
        (KIND, {"pin": True, **IMAGE}, "--pin works on this machine and hosts; kind binds ranks itself."),
        (LOCAL, {"set": {"API_KEY": "abc"}}, "secret"),
    ],
)
def test_options_that_do_not_apply_are_refused(cluster: Cluster, options: dict[str, Any], words: str) -> None:
    assert words in refusal(cluster, **options).message


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
BUILT = f"localhost/mlbench/digits_resnet:{__version__}"


@pytest.mark.parametrize("request_", [DIGITS, OWN])
@pytest.mark.parametrize(
    ("cluster", "image", "found"),
    [
        (LOCAL, None, None),
        (HOSTS, None, None),
        (SLURM, None, None),
        (SLURM, "me/train:1", "me/train:1"),
        (KIND, None, BUILT),
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
    ("cluster", "options", "words"),
    [
        (LOCAL, {}, "Nothing to run: --task, or --command is missing."),
        (SLURM, IMAGE, "Nothing to run: --command for the image is missing."),
        (KIND, {"command": "true"}, "--image is missing: your own command needs one on a cluster."),
        (LOCAL, {"command": "true", **IMAGE}, "--image does not apply to the local cluster, which runs processes."),
        (HOSTS, {"task": "mnist", **IMAGE}, "--image does not apply to hosts, which runs processes."),
        (LOCAL, {"task": "allreduce", "light": True}, 'The task "allreduce" has no goal, so --light does not apply.'),
        (LOCAL, {"task": "mnist", "run_on_all": False}, "--no-run-on-all works only with your own command"),
        (LOCAL, {"task": "allreduce", "command": "true"}, 'The task "allreduce" has no goal to measure your own'),
        (LOCAL, {"task": "mnist", "command": "x", "set": {"goal_light": 1}}, "goal_light is fixed by the task"),
        (LOCAL, {"command": "x", "preset": "tiny"}, "--preset works only with tasks"),
        (LOCAL, {"command": "x", "budget": "1h"}, "--budget works only with tasks"),
        (LOCAL, {"command": "x 'y"}, "cannot be split into words"),
        (LOCAL, {"command": "x", "backend": "nccl"}, "The backend nccl works only on GPUs."),
    ],
)
def test_programs_that_cannot_run(cluster: Cluster, options: dict[str, Any], words: str) -> None:
    asked = Request(name="run", workers=(2,), **options)
    with pytest.raises(UsageError) as caught:
        resolve(asked, cluster, HERE if cluster is LOCAL else None)
    assert caught.value.message.startswith(words) or words in caught.value.message


@pytest.mark.parametrize(
    ("budget", "timeout", "words"),
    [
        ("0s", None, "--budget 0s: it must be above 0 and below 30 days."),
        ("30d", "31d", "--budget 30d: it must be above 0 and below 30 days."),
        ("1h", "1h", "The timeout of 3600 s would end the run before its budget of 3600 s is used up."),
        ("24h", None, "The timeout of 86400 s would end the run before its budget of 86400 s is used up."),
        ("1h", "3601s", None),
        ("23h", None, None),
    ],
)
def test_a_budget_ends_before_the_timeout(budget: str, timeout: str | None, words: str | None) -> None:
    asked = Request(
        name="run", workers=(2,), task="cifar10_resnet20", set={"data": "synthetic"}, budget=budget, timeout=timeout
    )
    if words is None:
        assert resolve(asked, LOCAL, HERE)[0].parameters["budget_seconds"] > 0
        return
    with pytest.raises(UsageError) as caught:
        resolve(asked, LOCAL, HERE)
    assert caught.value.message == words


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
    assert one(set={"x": text}).parameters == {"x": value}


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


def test_a_request_may_have_a_thousand_repeats() -> None:
    check_names(replace(COMMAND, repeat=1000))
    check_names(replace(COMMAND, name="a" * 38))
    for options, words in (
        ({"repeat": 1001}, "--repeat 1001: the number must be from 1 to 1000."),
        ({"name": "a" * 39}, "has 41 characters"),
        ({"workers": (2, 2)}, "2 workers are given twice; both runs would be named run-2."),
    ):
        with pytest.raises(UsageError) as caught:
            check_names(replace(COMMAND, **options))
        assert words in caught.value.message


@pytest.mark.parametrize(("price", "per_hour"), [("0", 0.0), ("0.25", 0.5), ("999999.9", 1999999.8)])
def test_the_price_of_ones_own_machines(price: str, per_hour: float) -> None:
    assert one(worker_hour=price).price["per_hour"] == pytest.approx(per_hour)


@pytest.mark.parametrize("price", ["-0.1", "1000000", "1e6", "nan", "inf", "free", ""])
def test_prices_that_are_none(price: str) -> None:
    assert "is not a price in US dollars" in refusal(worker_hour=price).message


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


@pytest.mark.parametrize("path", ["data", "", "/a\0b", "/a\nb"])
def test_a_folder_that_other_machines_cannot_have(path: str) -> None:
    with pytest.raises(UsageError, match="on other machines the path must be absolute"):
        check_machine_folder(path)


# --- backends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "backend", "on_all"),
    [
        ({"backend": "GLOO"}, "gloo", True),
        ({"backend": "grpc"}, "grpc", True),
        ({"backend": "jax"}, "jax", True),
        ({"backend": "nccl", "gpu": True}, "nccl", True),
        ({"backend": "custom:ucc.v1"}, "ucc.v1", False),
        ({"custom_backend": "ucc", "backend": "custom:ucc"}, "ucc", False),
        ({"custom_backend": "a" * 40}, "a" * 40, False),
    ],
)
def test_who_starts_the_ranks_follows_from_the_backend(options: dict[str, Any], backend: str, on_all: bool) -> None:
    found = one(**options)
    assert (found.backend, found.run_on_all) == (backend, on_all)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"custom_backend": "a" * 41}, "is not a word of letters"),
        ({"custom_backend": "-a"}, "is not a word of letters"),
        ({"custom_backend": ""}, "is not a word of letters"),
        ({"custom_backend": "ucc", "backend": "custom:other"}, "exclude each other"),
        ({"backend": "gluu"}, 'There is no backend "gluu", only '),
        ({"backend": "nccl"}, "works only on GPUs"),
    ],
)
def test_backends_that_are_none(options: dict[str, Any], words: str) -> None:
    assert words in refusal(**options).message
