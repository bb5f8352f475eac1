"""Repeating the run of an archive: what its author chose, what must be the same here, and names and seeds of runs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.api import repetition as module
from mlbench_cli.api.repetition import (
    AuthorsProgram,
    Place,
    _authors_choices,
    _default_name,
    _open,
    _require_same_code,
    _require_same_task,
    _was_started_here,
    repeat_archive,
    reproduce_archives,
)
from mlbench_cli.api.workspace import Workspace
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import LOCAL, Cluster, Experiment, Member
from mlbench_cli.model.spec import NAME_LENGTH, KubernetesOptions, RunSpec
from mlbench_cli.results.archive.sign import OriginError, Signer
from mlbench_cli.runs import launch
from mlbench_cli.runs.request import Request
from tests.unit.results.runs import spec

COMMAND = ("python", "train.py", "--name", "a b")
OWN = spec("demo-2", 2, task="custom", preset="custom", argv=COMMAND)
LAB = Cluster("lab", "kind")


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def workspace(tmp_path: Path, notices: list[str]) -> Iterator[Workspace]:
    found = Workspace(tmp_path / "home", notice=notices.append)
    yield found
    found.close()


# --- what an author chose ---------------------------------------------------------------------------------------------


def test_a_command_is_an_authors_choice_as_a_shell_takes_it() -> None:
    assert list(_authors_choices(OWN, LOCAL)) == [("command", "python train.py --name 'a b'")]


# How much is run, measured and reserved, and faults of the run's own ranks.
HARMLESS: dict[str, Any] = {
    "name": "other-4", "cluster": "lab", "engine": "kubernetes", "backend": "mpi", "workers": 4,
    "parameters": {"epochs": 3}, "run_on_all": False, "goal": "light", "seed": 7, "processes_per_worker": 2,
    "device": "gpu", "gpus_per_worker": 2, "cpus": 3.0, "share_machine": True, "method": {"name": "dgc"},
    "servers_on": ("m1",), "network": "1gbit", "anonymous": True, "calibrate": True, "pin": True, "timeout": 60.0,
    "price": {"per_hour": 1.0}, "functional_only": "emulated", "cluster_kind": "gke/n1", "checkpoint_copy": "x",
    "faults": "kill 1", "on_failure": "restart", "detect_seconds": 5.0, "checkpoint_every": "30s",
}  # fmt: skip
HARMLESS_OPTIONS: dict[str, Any] = {
    "memory": "8Gi", "server_cpus": 2, "server_memory": "1Gi", "shm": "2Gi", "node_selector": {"a": "b"},
    "tolerations": ("a",), "queue": "q", "hold_seconds": 1, "keep_seconds": 2, "keep_storage": "1Gi",
    "collect": "all", "spread": False, "share_nodes": True, "egress": False, "provisioning_class": "p",
    "scheduler": "s", "fabric": {"name": "EFA"}, "network_method": "netem", "gpu_resource": "amd.com/gpu",
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_the_amount_of_work_needs_no_consent(name: str) -> None:
    changed = replace(OWN, **{name: HARMLESS[name]})
    assert [field for field, _ in _authors_choices(changed, LOCAL)] == ["command"]


def test_resources_of_pods_need_no_consent() -> None:
    options = {key: value for key, value in HARMLESS_OPTIONS.items() if key != "network_method"}
    changed = replace(OWN, kubernetes=KubernetesOptions(**options))
    assert [field for field, _ in _authors_choices(changed, LOCAL)] == ["command"]


@pytest.mark.parametrize(("name", "value"), [("image", "x/y:1"), ("data_dir", "/etc"), ("task_path", "/tmp/x")])
def test_code_and_files_need_consent(name: str, value: str) -> None:
    change: dict[str, Any] = {name: value}
    changed = replace(OWN, **change)
    assert list(_authors_choices(changed, LOCAL))[1:] == [(name, value)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("namespace", "kube-system"), ("pull_secret", "s"), ("env", {"A": "1"}), ("env_secret", "s")),
        *(("data_claim", "c"), ("template_dir", "/t"), ("host_network", True), ("registry", "evil.example")),
        *(("run_as_user", 0), ("assigned_user", True), ("cpu_limit", 3), ("writable_root", True)),
        *(("devices", {"rdma/hca": "1"}), ("pod_labels", {"a": "b"}), ("pod_annotations", {"a": "b"})),
        *(("priority_class", "system"), ("network_policy", False), ("job_set", True)),
    ],
)
def test_rights_in_a_cluster_need_consent(name: str, value: Any) -> None:
    changed = replace(OWN, kubernetes=KubernetesOptions(**{name: value}))
    assert list(_authors_choices(changed, LAB))[1:] == [(name, str(value))]


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A catalog whose tasks run "python -m task" with the image x/task:1."""
    task = SimpleNamespace(command=("python", "-m", "task"), search_path="/tasks")
    found = SimpleNamespace(task=task, rules=SimpleNamespace(to_dict=lambda: {"goal": 80, "command": ["python"]}))
    monkeypatch.setattr(module, "find_rules", lambda name, preset: found.rules)
    monkeypatch.setattr(module, "load_task", lambda name: task)
    monkeypatch.setattr(launch, "task_image", lambda task, cluster: "x/task:1")
    return found


def test_a_task_of_the_catalog_brings_nothing_of_its_author(catalog: Any) -> None:
    assert list(_authors_choices(spec(task_path="/tasks"), LOCAL)) == []
    assert list(_authors_choices(spec(task_path="/other"), LOCAL)) == [("task_path", "/other")]
    assert list(_authors_choices(spec(image="x/task:1"), LAB)) == []
    assert list(_authors_choices(spec(image="y/task:1"), LAB)) == [("image", "y/task:1")]
    assert list(_authors_choices(spec(image="x/task:1", task_path="/tasks"), LOCAL)) == [("image", "x/task:1")]


def test_without_a_registry_here_any_image_is_the_authors(catalog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: Any, cluster: Any) -> str:
        raise UsageError("There is no registry.")

    monkeypatch.setattr(launch, "task_image", fail)
    assert list(_authors_choices(spec(image="x/task:1"), LAB)) == [("image", "x/task:1")]


def test_a_task_that_is_none_of_ours_is_refused(catalog: Any) -> None:
    catalog.task.command = ("python", "-m", "other")
    with pytest.raises(UsageError, match="its command is not that of the catalog") as caught:
        list(_authors_choices(spec(), LOCAL))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Do not trust this archive.")
    catalog.rules = None
    with pytest.raises(UsageError, match='the task "unknown-task" is not in this catalog'):
        list(_authors_choices(spec(), LOCAL))


# --- what must be the same --------------------------------------------------------------------------------------------


def test_the_rules_of_a_task_must_be_those_of_then(catalog: Any) -> None:
    _require_same_task(spec(), {})
    _require_same_task(spec(), {"task": {"goal": 80, "command": ["python"]}})
    with pytest.raises(UsageError, match=r'the task "unknown-task" has changed since \(goal\)') as caught:
        _require_same_task(spec(), {"task": {"goal": 70, "command": ["python"]}, "mlbench": "3.9"})
    assert caught.value.hint == "Install mlbench 3.9, which made the archive."
    catalog.rules = None
    with pytest.raises(UsageError, match="is not in this catalog"):
        _require_same_task(spec(), {"task": {}})


@pytest.mark.parametrize(
    ("then", "now", "engine", "words"),
    [
        (None, "b" * 64, "local", None),
        ("a" * 64, "a" * 64, "local", None),
        ("a" * 64, "b" * 64, "kubernetes", None),
        ("a" * 64, "b" * 64, "local", "its digest was aaaaaaaaaaaa, now bbbbbbbbbbbb"),
        ("a" * 64, None, "local", "its digest was aaaaaaaaaaaa, now unknown"),
    ],
)
def test_the_code_of_a_local_run_must_be_that_of_then(
    monkeypatch: pytest.MonkeyPatch, then: str | None, now: str | None, engine: str, words: str | None
) -> None:
    code = None if now is None else SimpleNamespace(digest=now)
    monkeypatch.setattr(module, "collect_provenance", lambda run_spec: SimpleNamespace(code=code))
    document = {"mlbench": "3.9", "provenance": None if then is None else {"code": {"digest": then}}}
    if words is None:
        _require_same_code(spec(engine=engine), document)
    else:
        with pytest.raises(UsageError, match=words):
            _require_same_code(spec(engine=engine), document)


def test_only_a_run_of_an_experiment_here_was_started_here(workspace: Workspace) -> None:
    store = workspace.store
    run = store.record_run(OWN, run_id="aaaa")
    assert not _was_started_here("aaaa", OWN, store)  # `mlbench discover` found it
    store.record_experiment(Experiment("e1", "demo", "2026-01-01T00:00:00Z", {}, (Member(0, run.id, "h"),)), ())
    assert _was_started_here("aaaa", OWN, store)
    assert not _was_started_here("bbbb", OWN, store)
    assert not _was_started_here("aaaa", replace(OWN, argv=("rm",)), store)


# --- repeating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workers", "more", "expected"),
    [
        ("demo-2", 2, 0, "demo-again"),
        ("demo-2-r1", 2, 0, "demo-again"),
        ("demo-2-r1", 1, 0, "demo-2-again"),
        ("demo", 2, 0, "demo-again"),
        ("x" * 38 + "-2", 2, 0, "x" * 32 + "-again"),
        ("x" * 38 + "-2", 2, 3, "x" * 29 + "-again"),
        ("x" * 31 + "-" + "y" * 6 + "-2", 2, 0, "x" * 31 + "-again"),
    ],
)
def test_a_repetition_is_named_after_its_run(name: str, workers: int, more: int, expected: str) -> None:
    found = _default_name(SimpleNamespace(name=name, workers=workers), "again", more)  # type: ignore[arg-type]
    assert found == expected
    assert len(f"{found}-{workers}") + more <= NAME_LENGTH


class Archive:
    """An archive of a run."""

    def __init__(self, run_spec: RunSpec = OWN, run_id: str = "aaaa", **document: Any) -> None:
        self.path = Path("a.zip")
        self.run = {"id": run_id, "spec": run_spec.to_dict()}
        self.written = {**self.run, **document}

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def document(self, name: str) -> Any:
        assert name == "run.json"
        return self.written


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The archive that is opened, on a machine where everything can run."""
    found = SimpleNamespace(value=Archive(), checked=[])
    monkeypatch.setattr(module, "_open", lambda source, workspace: found.value)
    monkeypatch.setattr(module, "in_order", lambda archives: archives)
    monkeypatch.setattr(launch, "check_local", lambda run_spec, machine: found.checked.append(run_spec.name))
    return found


def test_a_run_is_repeated_once_its_program_is_agreed_to(
    workspace: Workspace, archive: Any, notices: list[str]
) -> None:
    agreed: list[AuthorsProgram] = []
    found = repeat_archive(workspace, "a.zip", Request(), require_goal=True, agree=agreed.append)
    assert agreed == [AuthorsProgram("a.zip", (("command", "python train.py --name 'a b'"),))]
    assert found.specs == [replace(OWN, name="demo-again-2")]
    assert (found.experiment.name, found.experiment.require_goal) == ("demo-again", True)
    assert found.experiment.request == {"name": "demo-again", "from": "aaaa"}
    assert archive.checked == ["demo-2"]
    assert notices == ["Warning: The run uses a custom command: its files are used in their current state."]
    named = repeat_archive(workspace, "a.zip", Request(name="mine"), agree=agreed.append)
    assert (named.experiment.name, named.specs[0].name, named.experiment.require_goal) == ("mine", "mine-2", False)
    with pytest.raises(UsageError, match="It was not run"):
        repeat_archive(workspace, "a.zip", Request())


def test_nobody_is_asked_about_a_run_of_this_machine(workspace: Workspace, archive: Any) -> None:
    run = workspace.store.record_run(OWN, run_id="aaaa")
    experiment = Experiment("e1", "demo", "2026-01-01T00:00:00Z", {}, (Member(0, run.id, "h"),))
    workspace.store.record_experiment(experiment, ())
    assert repeat_archive(workspace, "a.zip", Request()).specs[0].name == "demo-again-2"


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_signer_is_told_to_who_agrees(
    workspace: Workspace, archive: Any, notices: list[str], monkeypatch: pytest.MonkeyPatch, is_signed: bool
) -> None:
    signer = Signer("eva", "ED25519", "SHA256:abc")

    def check_origin(opened: Any, signers: Path) -> Signer:
        if not is_signed:
            raise OriginError("It is not signed.", details={"problem": "unsigned"})
        return signer

    monkeypatch.setattr(module, "check_origin", check_origin)
    agreed: list[AuthorsProgram] = []
    repeat_archive(workspace, "a.zip", Request(), signers=Path("signers"), agree=agreed.append)
    assert agreed[0].signer == (signer if is_signed else None)
    assert ("Warning: It is not signed." in notices) != is_signed


@pytest.mark.parametrize(
    ("run_spec", "words"),
    [
        (replace(OWN, cluster="far"), 'it ran on the cluster "far", which is not known here'),
        (replace(OWN, cluster="lab"), 'it ran on local, and the cluster "lab" is kubernetes here'),
        (replace(OWN, data_dir="/no/data"), "its data folder /no/data does not exist on this machine"),
        (
            replace(OWN, cluster="lab", engine="kubernetes", kubernetes=KubernetesOptions(template_dir="/no/t")),
            "its templates in /no/t do not exist on this machine",
        ),
    ],
)
def test_what_cannot_be_repeated_here_says_why(
    workspace: Workspace, archive: Any, run_spec: RunSpec, words: str
) -> None:
    workspace.store.record_cluster(LAB)
    archive.value = Archive(run_spec)
    with pytest.raises(UsageError) as caught:
        repeat_archive(workspace, "a.zip", Request(), agree=lambda program: None)
    assert caught.value.message == f"The run cannot be repeated here exactly: {words}."


def test_an_archive_is_a_path_or_a_run(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_verified", lambda path: path)
    found: Any = _open(str(tmp_path), workspace)
    assert found == tmp_path
    run = workspace.store.record_run(OWN)
    with pytest.raises(UsageError, match='The run "demo-2" has no results yet'):
        _open("demo-2", workspace)
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "SHA256SUMS").touch()
    found = _open("demo-2", workspace)
    assert found == run.folder
    for source in ("other", "a\0b"):
        with pytest.raises(NotFoundError, match=r"There is no archive .*, and no run of that name") as caught:
            _open(source, workspace)
        assert caught.value.hint == "mlbench download NAME"


# --- reproducing ------------------------------------------------------------------------------------------------------


def originals(*seeds: int, **changes: Any) -> Any:
    return [Archive(spec("demo-2", 2, seed=seed, **changes), f"id-{seed}") for seed in seeds]


@pytest.mark.parametrize(
    ("seeds", "repeats", "used"),
    [
        ((42, 43), 2, [42, 43]),
        ((43, 42), 1, [42]),
        ((42, 43), 4, [42, 43, 44, 45]),
        ((42, 44), 3, [42, 44, 45]),
        ((7, 7), 2, [7, 8]),
    ],
)
def test_seeds_are_those_of_the_original_then_the_next_ones(
    workspace: Workspace, archive: Any, catalog: Any, seeds: tuple[int, ...], repeats: int, used: list[int]
) -> None:
    catalog.task.search_path = None
    found = reproduce_archives(workspace, originals(*seeds), None, repeats, Place())
    assert [run_spec.seed for run_spec in found.specs] == used
    assert [run_spec.name for run_spec in found.specs] == [f"demo-repro-2-r{n}" for n in range(1, repeats + 1)]
    assert found.experiment.request == {"name": "demo-repro", "from": f"id-{seeds[0]}"}
    named = reproduce_archives(workspace, originals(*seeds), "mine", 1, Place())
    assert [run_spec.name for run_spec in named.specs] == ["mine-2-r1"]


def test_a_reproduction_of_another_cluster_is_told_where(
    workspace: Workspace, archive: Any, catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []

    def move(run_spec: RunSpec, cluster: Cluster, data_dir: str | None) -> RunSpec:
        moved.append((cluster.name, data_dir))
        return replace(run_spec, cluster=cluster.name, engine="kubernetes", image="x/task:1")

    monkeypatch.setattr(launch, "move", move)
    workspace.store.record_cluster(LAB)
    far = originals(42, cluster="far", engine="kubernetes")
    with pytest.raises(UsageError, match=r'The original ran on the cluster "far" \(kubernetes\)') as caught:
        reproduce_archives(workspace, far, None, 1, Place())
    assert caught.value.hint == "Choose where to repeat it: --cluster NAME (mlbench list-clusters)"
    found = reproduce_archives(workspace, far, None, 1, Place("lab", "/data"))
    assert (moved, found.specs[0].cluster) == ([("lab", "/data")], "lab")
    reproduce_archives(workspace, originals(42), None, 1, Place("lab"))
    assert moved[1:] == [("lab", None)]
    custom = [Archive(OWN, "aaaa")]
    with pytest.raises(UsageError, match="The original ran a command of its author, which is not started on another"):
        reproduce_archives(workspace, custom, None, 1, Place("lab"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not run commands chosen by the author"):
        reproduce_archives(workspace, custom, None, 1, Place())  # type: ignore[arg-type]


def test_data_are_where_the_reader_says(workspace: Workspace, archive: Any, catalog: Any, tmp_path: Path) -> None:
    catalog.task.search_path = None
    original = originals(42, data_dir="/theirs")
    found = reproduce_archives(workspace, original, None, 1, Place(None, str(tmp_path)))
    assert found.specs[0].data_dir == str(tmp_path)
    with pytest.raises(UsageError) as caught:
        reproduce_archives(workspace, original, None, 1, Place())
    assert caught.value.hint == "Name the folder of this data on this machine: --data-dir FOLDER"


def test_a_task_that_has_changed_is_not_repeated(workspace: Workspace, archive: Any, catalog: Any) -> None:
    archive.value = Archive(spec("demo-2", 2), task={"goal": 70, "command": ["python"]})
    with pytest.raises(UsageError, match="has changed since"):
        repeat_archive(workspace, "a.zip", Request(), agree=lambda program: None)
    assert archive.checked == []
