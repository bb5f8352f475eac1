"""Request + cluster -> run specs: what is resolved how, and that every wrong combination is refused in words."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli import __version__
from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.cluster_details import PlanRecord
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.judge import price_of
from mlbench_cli.runs.fault_options import check_faults
from mlbench_cli.runs.launch import Machine, check_names, local_machine, move, resolve
from mlbench_cli.runs.request import Request, apply_point, matrix_of
from mlbench_cli.tasks.catalog import load_catalog
from providers.pins import require_pin

MACHINE = Machine(cores=4, gpus=0)
WITH_GPUS = Machine(cores=4, gpus=2)
REMOTE = Cluster("far", "kind")
DIGITS = Request(name="run", workers=(1, 2), task="digits_resnet")
ELSEWHERE = replace(DIGITS, registry="ghcr.io/me")  # clusters but KIND's need a registry
CIFAR = Request(name="run", workers=(1, 2), task="cifar10_resnet20")
COMMAND = Request(name="run", workers=(2,), command="python train.py --rank {rank} 'two words'")


TORCH = require_pin("images", "torch")


def one(request: Request, cluster: Cluster = LOCAL, machine: Machine = MACHINE, **changes: Any) -> RunSpec:
    changes = {"workers": request.workers[:1], **changes}
    return resolve(replace(request, **changes), cluster, machine)[0]


def refusal(request: Request, cluster: Cluster = LOCAL, machine: Machine = MACHINE, **changes: Any) -> MlbenchError:
    with pytest.raises((UsageError, NotFoundError)) as caught:
        resolve(replace(request, **changes), cluster, machine)
    return caught.value


# --- what is resolved how --------------------------------------------------------------------------------------------


def test_a_task_with_its_defaults() -> None:
    first, second = resolve(DIGITS, LOCAL, MACHINE)
    task = load_catalog()["digits_resnet"]
    assert (first.name, second.name) == ("run-1", "run-2")
    assert (first.workers, second.workers) == (1, 2)
    assert (first.engine, first.cluster, first.backend, first.device) == ("local", "local", "gloo", "cpu")
    assert (first.preset, first.argv, first.goal, first.seed) == ("spec", task.command, "full", 42)
    assert first.parameters == task.resolve("spec")
    assert first.timeout == 86400
    assert one(DIGITS).cpus == 4.0  # all of the machine, recorded


def test_what_is_said_counts() -> None:
    spec = one(
        DIGITS,
        preset="tiny",
        set={"learning_rate": "1e-3", "epochs": 3},
        light=True,
        seed=7,
        timeout="1h30m",
        num_cpus=4,
    )
    assert spec.parameters["learning_rate"] == 0.001
    assert spec.parameters["epochs"] == 3
    assert spec.parameters["depth"] == 8
    assert (spec.goal, spec.seed, spec.timeout) == ("light", 7, 5400)


def test_a_task_says_how_long_its_runs_wait_for_missing_nodes() -> None:
    certify = Request(name="run", workers=(4,), task="certify")
    assert one(DIGITS).absent_seconds is None
    assert one(certify).absent_seconds == 180.0
    assert one(certify, absent="15s").absent_seconds == 15.0


@pytest.mark.parametrize("asked", [1, 2, 3, 64])
def test_the_number_of_cpus_means_what_it_says(asked: int) -> None:
    assert one(DIGITS, num_cpus=asked).cpus == float(asked)
    assert one(DIGITS, REMOTE, num_cpus=asked).cpus == float(asked)


def test_the_threads_of_the_user_are_recorded_unless_a_number_of_cpus_is_given() -> None:
    machine = Machine(cores=8, gpus=0, threads=3)
    pairs = replace(DIGITS, processes_per_worker=2)
    assert [spec.cpus for spec in resolve(DIGITS, LOCAL, machine)] == [3.0, 3.0]
    assert [spec.cpus for spec in resolve(pairs, LOCAL, machine)] == [6.0, 6.0]
    assert [spec.cpus for spec in resolve(replace(DIGITS, num_cpus=2), LOCAL, machine)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("given", "threads"),
    [("4", 4), (" 4,2 ", 4), ("", None), ("0", None), ("-1", None), ("many", None), ("9" * 9, None)],
)
def test_threads_of_the_user_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str, threads: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert local_machine().threads == threads


def test_sharing_is_about_this_machine_only() -> None:
    assert one(DIGITS, share_machine=True).share_machine
    with pytest.raises(UsageError, match="--share-machine applies only to this machine"):
        one(DIGITS, REMOTE, share_machine=True)


def test_the_kind_of_a_cluster_is_recorded() -> None:
    assert one(DIGITS).cluster_kind == "local"
    assert (
        one(ELSEWHERE, Cluster("c", "gke", details={"machine_type": "n1-standard-4"})).cluster_kind
        == "gke/n1-standard-4"
    )
    assert one(ELSEWHERE, Cluster("c", "attached")).cluster_kind == "attached"


def test_runs_to_compare_have_equal_cpus_per_worker() -> None:
    request = replace(DIGITS, workers=(1, 2, 4))
    assert [spec.cpus for spec in resolve(request, LOCAL, Machine(cores=8, gpus=0))] == [2.0, 2.0, 2.0]
    assert [spec.cpus for spec in resolve(request, LOCAL, Machine(cores=2, gpus=0))] == [1.0, 1.0, 1.0]
    pairs = replace(request, processes_per_worker=2)
    assert [spec.cpus for spec in resolve(pairs, LOCAL, Machine(cores=16, gpus=0))] == [4.0, 4.0, 4.0]
    assert [spec.cpus for spec in resolve(request, REMOTE)] == [None, None, None]


def test_repeats_have_names_and_seeds_of_their_own() -> None:
    specs = resolve(replace(DIGITS, repeat=3, seed=7), LOCAL, MACHINE)
    assert [(spec.name, spec.workers, spec.seed) for spec in specs] == [
        *(("run-1-r1", 1, 7), ("run-2-r1", 2, 7)),
        *(("run-1-r2", 1, 8), ("run-2-r2", 2, 8)),
        *(("run-1-r3", 1, 9), ("run-2-r3", 2, 9)),
    ]
    assert {spec.cpus for spec in specs} == {2.0}
    assert [spec.name for spec in resolve(replace(DIGITS, repeat=1), LOCAL, MACHINE)] == ["run-1", "run-2"]
    with pytest.raises(UsageError, match='already a run "run-2-r3"'):
        check_names(replace(DIGITS, repeat=3), taken={"run-2-r3"})


def test_a_budget_is_a_parameter_of_the_task() -> None:
    assert one(CIFAR, budget="2h").parameters["budget_seconds"] == 7200
    assert one(CIFAR).parameters["budget_seconds"] == 0
    able = refusal(Request(name="x", workers=(1,), task="allreduce"), budget="2h").hint or ""
    assert "cifar10_resnet20, cifar10_resnet20_ddp" in able


def test_a_command_held_to_a_tasks_goal() -> None:
    spec = one(DIGITS, command="python mine.py {rate}", set={"rate": 3})
    assert (spec.task, spec.preset, spec.argv) == ("digits_resnet", "open", ("python", "mine.py", "3"))
    assert spec.parameters == {"goal_full": 98.0, "goal_light": 90.0, "rate": 3}
    assert one(DIGITS, REMOTE, command="python mine.py").image == TORCH
    assert one(DIGITS, REMOTE, command="python mine.py", image="me/mine:1").image == "me/mine:1"


def test_a_command_is_split_once_and_its_settings_are_put_in() -> None:
    settings = {"lr": "0.1", "name": "a b", "list": "[1, 2]"}
    spec = one(COMMAND, command="python train.py --rank {rank} {lr} {name} {list} 'two words'", set=settings)
    assert spec.argv == ("python", "train.py", "--rank", "{rank}", "0.1", "a b", "[1, 2]", "two words")
    assert (spec.task, spec.preset, spec.image) == ("custom", "custom", None)
    assert spec.parameters == {"lr": 0.1, "name": "a b", "list": [1, 2]}


@pytest.mark.parametrize(
    ("changes", "backend", "on_all"),
    [
        ({}, "gloo", True),
        ({"backend": "MPI"}, "mpi", False),
        ({"backend": "mpi", "run_on_all": True}, "mpi", True),
        ({"backend": "custom:ucc"}, "ucc", False),
        ({"custom_backend": "ucc", "run_on_all": True}, "ucc", True),
        ({"backend": "custom", "custom_backend": "ucc"}, "ucc", False),
        ({"run_on_all": False}, "gloo", False),
    ],
)
def test_backends_of_a_command(changes: dict[str, Any], backend: str, on_all: bool) -> None:
    spec = one(COMMAND, **changes)
    assert (spec.backend, spec.run_on_all) == (backend, on_all)


def test_a_task_takes_a_custom_backend() -> None:
    assert one(DIGITS, custom_backend="ucc").backend == "ucc"
    assert one(DIGITS, custom_backend="ucc", run_on_all=True).run_on_all


def test_gpus() -> None:
    spec = one(DIGITS, machine=WITH_GPUS, gpu=True)
    assert (spec.device, spec.backend, spec.gpus_per_worker, spec.processes_per_worker) == ("gpu", "nccl", 1, 1)
    spec = one(DIGITS, REMOTE, gpu=True, gpus_per_worker=8)
    assert (spec.gpus_per_worker, spec.processes_per_worker, spec.world_size) == (8, 8, 8)
    eight = Cluster("eight", "eks", details={"gpus_per_node": 8})
    for changes, gpus, processes in (
        ({}, 8, 8),  # one process per GPU of the machine
        ({"gpus_per_worker": 2}, 2, 2),
        ({"processes_per_worker": 3}, 1, 3),
        ({"spread": False}, 1, 1),  # workers share machines
    ):
        spec = one(ELSEWHERE, eight, gpu=True, **changes)
        assert (spec.gpus_per_worker, spec.processes_per_worker) == (gpus, processes)
    shared = one(DIGITS, machine=WITH_GPUS, workers=(4,), gpu=True, backend="gloo")
    assert shared.backend == "gloo"


def test_a_cluster_gets_its_options(tmp_path: Path) -> None:
    spec = one(
        COMMAND,
        replace(REMOTE, details={"node_selector": {"disk": "any", "zone": "a"}, "provisioning_class": "booked"}),
        image="me/train:1",
        namespace="team",
        memory="8Gi",
        node_selector={"disk": "ssd"},
        collect="all",
        env={"LEVEL": "info"},
        spread=False,
        registry="ghcr.io/me/",
        data_claim="sets",
    )
    options = spec.pods
    assert (spec.engine, spec.cluster, spec.image) == ("kubernetes", "far", "me/train:1")
    assert (options.namespace, options.memory, options.shm) == ("team", "8Gi", "1Gi")
    assert options.node_selector == {"disk": "ssd", "zone": "a"}
    assert options.start_timeout == 7 * 86400  # a booking may take days
    assert spec.env == {"LEVEL": "info"}
    assert (options.collect, options.spread, options.registry) == ("all", False, "ghcr.io/me")
    assert (options.data_claim, spec.data_dir) == ("sets", "/data")


def test_the_image_of_a_task() -> None:
    far = Cluster("far", "kind", details={"registry": "localhost:5000"})
    assert one(DIGITS).image is None
    built = f"localhost/mlbench/digits_resnet:{__version__}"
    assert one(DIGITS, REMOTE).image == require_pin("images", "torch")
    assert one(DIGITS, Cluster("near", "kind", details={"options": {"load": [built]}})).image == built
    assert one(DIGITS, Cluster("g", "gke", details={"gpu": "nvidia-l4"})).image == TORCH.replace(
        "docker.io", "mirror.gcr.io"
    )
    newest = Cluster("b", "eks", details={"gpu": "B200"})
    assert one(DIGITS, newest).image == require_pin("images", "torch-blackwell")
    instinct = Cluster("m", "attached", details={"gpu_resource": "amd.com/gpu"})
    assert one(DIGITS, instinct).image == require_pin("images", "torch-rocm")
    assert "for x86 processors" in refusal(DIGITS, Cluster("a", "gke", details={"arm": True})).message
    translation = replace(DIGITS, task="wmt17_transformer")  # its workers install sacrebleu
    assert one(translation, REMOTE).image == require_pin("images", "torch")
    assert one(DIGITS, far).image == f"localhost:5000/digits_resnet:{__version__}"
    assert one(DIGITS, far, registry="ghcr.io/me/").image == f"ghcr.io/me/digits_resnet:{__version__}"
    assert one(DIGITS, far, image="mine:1").image == "mine:1"


def test_the_data_folder_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert one(DIGITS, data_dir="data").data_dir == str(tmp_path / "data")
    assert one(DIGITS, REMOTE, data_dir="/datasets").data_dir == "/datasets"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "changes", "words"),
    [
        (DIGITS, {"name": None}, "no name"),
        (DIGITS, {"workers": ()}, "No number of workers"),
        (DIGITS, {"workers": (2, 4, 2)}, "given twice"),
        (DIGITS, {"workers": (0,)}, "from 1 to 4096"),
        (DIGITS, {"workers": (65,)}, "allows at most 64"),
        (DIGITS, {"workers": (33,), "processes_per_worker": 2}, "66 ranks"),
        (DIGITS, {"name": "My_Run"}, "not a DNS label"),
        (DIGITS, {"name": "a" * 39}, "41 characters"),
        (DIGITS, {"task": "digits_resne"}, 'Did you mean "digits_resnet"?'),
        (DIGITS, {"preset": "tinny"}, 'Did you mean "tiny"?'),
        (DIGITS, {"set": {"epoch": "3"}}, 'Did you mean "epochs"?'),
        (DIGITS, {"set": {"epochs": "many"}}, "not of type int"),
        (DIGITS, {"set": {"epochs": "0"}}, "the least is 1"),
        (DIGITS, {"set": {"momentum": "1.5"}}, "the most is 1"),
        (DIGITS, {"backend": "glo"}, 'Did you mean "gloo"?'),
        (DIGITS, {"backend": "nccl"}, "works only on GPUs"),
        (DIGITS, {"on_failure": "shrink"}, "--on-failure shrink was removed"),
        (DIGITS, {"on_failure": "restrt"}, 'Did you mean "restart"?'),
        (DIGITS, {"backend": "custom"}, "the name is missing"),
        (DIGITS, {"backend": "custom:a b"}, "is not a word"),
        (DIGITS, {"backend": "gloo", "custom_backend": "x"}, "exclude each other"),
        (DIGITS, {"gpu": True}, "this machine has no GPU"),
        (DIGITS, {"gpus_per_worker": 2}, "needs --gpu"),
        (DIGITS, {"gpu": True, "gpus_per_worker": 0}, "the minimum is 1"),
        (DIGITS, {"num_cpus": 0}, "the minimum is 1"),
        (DIGITS, {"processes_per_worker": 0}, "from 1 to 64"),
        (DIGITS, {"seed": -1}, "The seed"),
        (DIGITS, {"timeout": "soon"}, "is not a duration"),
        (DIGITS, {"timeout": "0s"}, "above 0"),
        (DIGITS, {"timeout": "31d"}, "at most 30 days"),
        (DIGITS, {"run_on_all": False}, "always run on all workers"),
        (DIGITS, {"image": "me/train"}, "does not apply to the local cluster"),
        (DIGITS, {"memory": "8Gi"}, "does not apply on the local cluster"),
        (DIGITS, {"env": {"A": "1"}}, "does not apply on the local cluster"),
        (DIGITS, {"spread": False}, "does not apply on the local cluster"),
        (DIGITS, {"command": "true", "set": {"goal_full": 1}}, "goal_full is fixed by the task"),
        (
            Request(name="x", workers=(1,), task="allreduce"),
            {"command": "true"},
            "has no goal to measure your own command",
        ),
        (Request(name="x", workers=(1,), task="allreduce"), {"budget": "2h"}, "cannot train for a fixed time"),
        (CIFAR, {"budget": "2h", "set": {"budget_seconds": 1}}, "exclude each other"),
        (CIFAR, {"budget": "2h", "timeout": "1h"}, "timeout of 3600 s would end the run before its budget of 7200 s"),
        (CIFAR, {"budget": "2h", "timeout": "2h"}, "before its budget"),
        (CIFAR, {"budget": "25h"}, "before its budget"),
        (CIFAR, {"budget": "0s"}, "above 0"),
        (CIFAR, {"budget": "soon"}, 'run.budget "soon" is not a duration'),
        (COMMAND, {"budget": "2h"}, "run.budget works only with tasks"),
        (DIGITS, {"repeat": 0}, "from 1 to 1000"),
        (DIGITS, {"repeat": 2, "seed": 2**32 - 1}, "The seed is 4294967296"),
        (DIGITS, {"data_dir": "/no/such/folder"}, "does not exist"),
        (Request(name="allreduce", workers=(1,), task="allreduce"), {"light": True}, "has no goal"),
        (COMMAND, {"command": None}, "--task, or --command is missing"),
        (COMMAND, {"command": "unclosed 'quote"}, "cannot be split"),
        (COMMAND, {"command": "''"}, "is empty"),
        (COMMAND, {"command": ""}, "is empty"),
        (COMMAND, {"command": "python \0"}, "zero byte"),
        (COMMAND, {"preset": "tiny"}, "--preset works only with tasks"),
        (COMMAND, {"command": "true {a}", "set": {"a": {1, 2}}}, "JSON cannot hold"),
        (COMMAND, {"command": "true {a}", "set": {"a": [float("nan")]}}, "JSON cannot hold"),
        (DIGITS, {"network": "1gbit,loss=1%"}, "loss is not supported"),
        (DIGITS, {"network": "fast"}, 'the rate "fast" is not a number'),
        (COMMAND, {"network": "model:1gbit"}, "of tasks, not of your own command"),
        (DIGITS, {"network": "model:1gbit", "set": {"comm.delay": "0.1,0"}}, "exclude each other"),
        (DIGITS, {"network": "model:1gbit", "method": "ddp"}, "has no messages of its own that --network model"),
        (DIGITS, {"servers": 2, "method": "ddp"}, "The method ddp has no parameter servers"),
        (COMMAND, {"network": "1gbit", "backend": "custom:mine"}, "may communicate through shared memory"),
        (CIFAR, {"network": "1gbit", "backend": "mpi"}, "may communicate through shared memory"),
    ],
)
def test_refused_on_this_machine(request_: Request, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(request_, **changes).message


def test_checkpoints_are_as_frequent_as_faults_make_it_worthwhile() -> None:
    asked: dict[str, Any] = {"workers": (2,), "on_failure": "restart"}
    assert one(CIFAR, **asked).checkpoint_every == "60s"
    assert one(CIFAR, **asked, faults="every ~600s kill any rank").checkpoint_every == "7.7s"
    assert one(CIFAR, **asked, checkpoint_every="5").checkpoint_every == "5"


def test_faults_in_pods_are_refused() -> None:
    with pytest.raises(UsageError, match="--faults does not work on Kubernetes"):
        check_faults(replace(one(DIGITS, workers=(2,)), engine="kubernetes", faults="at 9s kill rank 1"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, "There is no file"),
        ({"memory": "8GB"}, "not a Kubernetes quantity"),
        ({"shm": "lots"}, "not a Kubernetes quantity"),
        ({"namespace": "Team"}, "not a Kubernetes name"),
        ({"start_timeout": "-5m"}, "is not a duration"),
        ({"collect": "some"}, "neither rank0 nor all"),
        ({"node_selector": {"a key": "x"}}, "not a valid label key"),
        ({"env": {"1A": "x"}}, "not the name of a variable"),
        ({"env": {"RANK": "0"}}, "set by mlbench itself"),
        ({"env": {"MLBENCH_GOAL": "0"}}, "set by mlbench itself"),
        ({"env": {"HF_TOKEN": "x"}}, "looks like a secret"),
        ({"data_claim": "a/b"}, "not a Kubernetes name"),
        ({"data_claim": "sets", "data_dir": "data"}, "cannot be a data folder"),
        ({"data_claim": "sets", "data_dir": "/dev/shm"}, "cannot be a data folder"),
        ({"data_dir": "/tmp/"}, "cannot be a data folder"),
    ],
)
def test_refused_on_a_cluster(changes: dict[str, Any], words: str) -> None:
    request = replace(COMMAND, image="me/train:1")
    assert words in refusal(request, REMOTE, **changes).message


def test_a_network_is_written_one_way_and_can_be_an_axis() -> None:
    assert one(DIGITS, network="1000mbit, 5000us").network == "1gbit,5ms"
    assert one(DIGITS).network is None
    request = replace(DIGITS, matrix={"network": ("1gbit,5ms", "100mbit")})
    points = matrix_of(request).points()
    assert [one(apply_point(request, point)).network for point in points] == ["1gbit,5ms", "100mbit"]


def test_refused_where_the_task_cannot() -> None:
    task = replace(load_catalog()["digits_resnet"], backends=("mpi",), devices=("cpu",))
    with pytest.raises(UsageError, match="has no backend gloo, only mpi"):
        resolve(replace(DIGITS, backend="gloo"), LOCAL, MACHINE, {task.name: task})
    with pytest.raises(UsageError, match="runs on cpu only, not on gpu"):
        resolve(replace(DIGITS, gpu=True), LOCAL, WITH_GPUS, {task.name: task})
    assert resolve(DIGITS, LOCAL, MACHINE, {task.name: task})[0].backend == "mpi"


def test_refused_without_enough_gpus() -> None:
    for ranks in ({"workers": (3,)}, {"workers": (2,), "processes_per_worker": 2}):
        assert "one GPU per rank" in refusal(DIGITS, machine=WITH_GPUS, gpu=True, **ranks).message
    no_gpus = Cluster("far", "kind", details={"gpus_per_node": 0})
    assert "has no GPUs" in refusal(DIGITS, no_gpus, gpu=True).message


def test_machines_of_ones_own_have_the_price_that_is_named() -> None:
    spec = one(Request("x", (2,), task="digits_resnet", worker_hour="0.05"))
    assert (spec.price["per_hour"], spec.price["currency"]) == (0.1, "USD")
    assert price_of(spec.price, 1800.0) == {**spec.price, "amount": 0.05}
    for wrong in ("free", "-1", "nan", "inf"):
        assert "a price in US dollars" in refusal(Request("x", (2,), task="digits_resnet", worker_hour=wrong)).message


def test_a_run_keeps_the_price_of_its_cluster_and_gets_its_network_cards() -> None:
    plan: PlanRecord = {
        "price_per_hour": None,
        "currency": "USD",
        "price_source": "a table",
        "price_table": "1",
        "lines": [],
        "warnings": [],
    }
    details = {"plan": plan, "devices_per_node": {"vpc.amazonaws.com/efa": 4}}
    (spec,) = resolve(replace(ELSEWHERE, workers=(2,)), Cluster("far", "eks", details=details))
    assert spec.price == {"per_hour": None, "currency": "USD", "source": "a table", "table": "1"}
    assert spec.pods.devices == {"vpc.amazonaws.com/efa": "4"}
    assert RunSpec.from_dict(spec.to_dict()) == spec
    (shared,) = resolve(replace(ELSEWHERE, workers=(2,), spread=False), Cluster("far", "eks", details=details))
    assert shared.pods.devices == {}
    assert resolve(DIGITS, LOCAL, MACHINE)[0].price == {}


def test_names_of_other_runs_are_taken() -> None:
    check_names(DIGITS, taken=["run-3"])
    with pytest.raises(UsageError, match='already a run "run-2"'):
        check_names(DIGITS, taken=["run-2"])


# --- the same run elsewhere ------------------------------------------------------------------------------------------


def test_a_run_moves_to_another_cluster_as_if_it_had_been_asked_for_there() -> None:
    asked = replace(DIGITS, method="wfbp", light=True, num_cpus=2, seed=7)
    here, there = one(asked), one(asked, REMOTE)
    assert move(here, REMOTE, None) == there
    assert move(there, LOCAL, None) == here
    assert move(here, REMOTE, "/data").data_dir == "/data"


def test_nothing_of_a_runs_own_options_on_kubernetes_moves_with_it() -> None:
    rights: dict[str, Any] = {"env": {"A": "b"}, "pull_secret": "pull", "image": None}
    spec = one(DIGITS, REMOTE, **rights)
    assert spec.env
    assert move(spec, Cluster("other", "kind"), None) == replace(one(DIGITS, REMOTE), cluster="other")


@pytest.mark.parametrize(
    ("asked", "cluster", "words"),
    [
        (replace(DIGITS, network="1gbit"), Cluster("h", "hosts"), "--network"),
        (replace(DIGITS, network="model:1gbit"), REMOTE, "this machine only"),
    ],
)
def test_a_run_that_a_cluster_cannot_repeat_does_not_move(asked: Request, cluster: Cluster, words: str) -> None:
    spec = one(asked, workers=(2,))
    with pytest.raises(UsageError, match=words):
        move(spec, cluster, None)
