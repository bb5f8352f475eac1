"""Facts for predictions from finished runs: which archives count, what they tell of a task, and what is refused."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.api import calibrated as module
from mlbench_cli.api.calibrated import (
    DEFAULT_METHODS,
    MAX_RUNS,
    estimate_on_cluster,
    make_question,
    open_archives,
    open_run,
    own_method,
    predictor,
    read_calibration,
    read_run_probe,
)
from mlbench_cli.errors import DamagedArchive, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.predict.machines import Calibrated
from mlbench_cli.predict.plan import keeps_samples
from mlbench_cli.simulator.calibration import FILE
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import load_catalog
from task_images.comm.presets import PRESETS, resolve
from tests.unit.predict.test_plan import question
from tests.unit.results.runs import spec

# Of a rank whose step takes 0.25 s for 32 samples without communication: 128 samples a second.
CALIBRATION: dict[str, Any] = {
    "schema_version": 1, "ranks": 2, "backend": "gloo", "threads": 1, "cores": 2.0, "batch": 32,
    "tensors": [{"name": "layer", "bytes": 400_000, "ready_p10": 0.1, "ready_p50": 0.1, "ready_p90": 0.1}],
    "forward": [0.05] * 3, "backward": [0.2] * 3, "optimizer": [0.05] * 3, "collectives": [],
}  # fmt: skip
PROBED = {"networks": 2, "rtt_seconds": 0.01, "together_bits_per_second": 1e9}
LINK = Link(0.005, 8e-9)  # half the round trip, and seconds per byte


class Archive:
    """An archive in memory of a run that reached 80 after 5,000 samples at batch 64."""

    def __init__(self, name: str = "cal-2", calibration: Any = CALIBRATION, **changes: Any) -> None:
        self.document = calibration
        self.names = {"run.json"} | ({FILE} if calibration is not None else set())
        details = {"global_batch": 64, **changes.pop("details", {})}
        own = {"task": "digits_resnet", "parameters": {"batch_size": 32}, "method": {}, **changes.pop("spec", {})}
        self.run = {"name": name, "spec": own}
        self.environment = {"ranks": {"0": changes.pop("rank", {})}}
        self.result = {
            "outcome": "goal_reached", "goal": {"kind": "full", "threshold": 80.0}, "samples": 5000, "timings": {},
            "world_size": 2, "details": details, "network": None, **changes,
        }  # fmt: skip

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, name: str, limit: int) -> bytes:
        assert name == FILE
        return json.dumps(self.document).encode()


def ask(*archives: Any, goal: str | None = None, methods: str | None = "bsp", task: str = "digits_resnet") -> Any:
    found, base = make_question(load_catalog()[task], archives, goal, methods)
    assert base is archives[0]
    return found


# --- what an archive tells --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "task", "name"),
    [
        (resolve("dgc").to_dict(), "digits_resnet", "dgc"),
        ("fusion", "digits_resnet", "fusion"),
        ({}, "digits_resnet", "bsp"),
        (None, "digits_resnet_ddp", "ddp"),
        (None, "ddp_digits", "bsp"),
        ("none of ours", "digits_resnet", "bsp"),
        ({"codec": "zip"}, "digits_resnet", "bsp"),
        ({"nonsense": "x"}, "digits_resnet_ddp", "ddp"),
    ],
)
def test_the_method_of_a_run_is_its_own_or_that_of_its_task(given: Any, task: str, name: str) -> None:
    archive: Any = Archive(spec={"method": given, "task": task})
    assert own_method(archive) == resolve(name)


def test_a_run_that_was_not_calibrated_says_how_to_calibrate_one() -> None:
    with pytest.raises(NotFoundError, match=rf'The run "cal-2" was not calibrated: it has no {FILE}') as caught:
        read_calibration(Archive(calibration=None), required=False)  # type: ignore[arg-type]
    assert caught.value.hint == "Measure one: mlbench run NAME 2 --task TASK --calibrate"


def test_a_calibration_has_the_link_of_its_probe_or_none() -> None:
    probed: Any = Archive(network=PROBED)
    calibration, link, error = read_calibration(probed, required=True)
    assert (calibration.batch, link, error) == (32, LINK, 0.0)
    alone: Any = Archive()
    assert read_calibration(alone, required=False)[1:] == (Link(0.0, 0.0), 0.0)
    with pytest.raises(UsageError, match="measured neither collectives nor a network"):
        read_calibration(alone, required=True)


def test_the_network_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_one(store: Any, name: str, unproven: bool) -> Archive:
        opened.append((name, unproven))
        return Archive(name, network=PROBED if name == "far" else None)

    monkeypatch.setattr(module, "open_run", open_one)
    assert read_run_probe(None, "far", True) == LINK  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match='The run "near" did not probe a network between machines'):
        read_run_probe(None, "near", False)  # type: ignore[arg-type]
    assert opened == [("far", True), ("near", False)]


# --- which archives ---------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path)
    yield found
    found.close()


def record(store: Store, name: str, sealed: bool = True, task: str = "digits_resnet") -> Path:
    run = store.record_run(spec(name, 1, task=task))
    run.folder.mkdir(parents=True, exist_ok=True)
    if sealed:
        (run.folder / "SHA256SUMS").touch()
    return run.folder


def test_an_archive_is_a_path_or_a_sealed_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "open_verified", lambda path, *, unproven: (path, unproven))
    folder = record(store, "a-1")
    record(store, "open-1", sealed=False)
    (tmp_path / "b-1").mkdir()
    found: Any = [open_run(store, "a-1"), open_run(store, "b-1", True)]
    assert found == [(folder, False), (Path("b-1"), True)]
    with pytest.raises(UsageError, match='The run "open-1" has no results yet') as caught:
        open_run(store, "open-1")
    assert caught.value.hint == "mlbench wait open-1"
    with pytest.raises(NotFoundError):
        open_run(store, "c-1")


@pytest.fixture
def archives(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Archives by the names of their runs; an exception is raised."""
    known: dict[str, Any] = {}

    def open_one(store: Any, name: str, unproven: bool) -> Any:
        found = known.get(name, NotFoundError(name))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(module, "open_run", open_one)
    return known


def test_runs_that_are_named_are_all_used_in_their_order(store: Store, archives: dict[str, Any]) -> None:
    archives |= {name: Archive(name) for name in ("a-1", "b-1")}
    archives["other-1"] = Archive("other-1", spec={"task": "mnist"})
    with ExitStack() as stack:
        found = open_archives(store, "digits_resnet", ["b-1", "a-1"], False, stack)
        assert [archive.run["name"] for archive in found] == ["b-1", "a-1"]
        with pytest.raises(UsageError, match=r"The run other-1 is of mnist, not of digits_resnet\."):
            open_archives(store, "digits_resnet", ["a-1", "other-1"], False, stack)


def test_without_names_the_newest_calibrated_run_is_first_and_runs_like_it_follow(
    store: Store, archives: dict[str, Any]
) -> None:
    """Runs may differ in what changes only the way to the goal, such as batch size and learning rate."""
    plain = {"batch_size": 32, "depth": 20}
    changed = ("batch_size", "global_batch", "micro_batch", "learning_rate", "epochs", "steps", "warmup")
    tuned = {**dict.fromkeys(changed, 2), "depth": 20}
    archives |= {
        "a-1": Archive("a-1", spec={"parameters": plain}),
        "b-1": Archive("b-1", spec={"parameters": {**plain, "depth": 56}}),
        "c-1": DamagedArchive("c-1", "run.json", "changed"),
        "d-1": Archive("d-1", outcome="goal_missed"),
        "e-1": Archive("e-1", spec={"parameters": plain}),
        "f-1": Archive("f-1", None, spec={"parameters": tuned}),
    }
    for name in ("a-1", "b-1", "c-1", "d-1", "e-1", "f-1"):
        record(store, name)
    record(store, "g-1", sealed=False)
    record(store, "h-1", task="mnist")
    with ExitStack() as stack:
        found = open_archives(store, "digits_resnet", None, False, stack)
    assert [archive.run["name"] for archive in found] == ["e-1", "f-1", "a-1"]


def test_no_calibrated_run_says_how_to_make_one(store: Store, archives: dict[str, Any]) -> None:
    archives["a-1"] = Archive("a-1", None)
    record(store, "a-1")
    with ExitStack() as stack, pytest.raises(NotFoundError) as caught:
        open_archives(store, "digits_resnet", (), False, stack)
    assert caught.value.message == (
        "No calibrated run of digits_resnet that reached its goal is known on this machine."
    )
    assert caught.value.hint == "mlbench run cal 2 --task digits_resnet --calibrate --num-cpus 1"


def test_not_more_runs_are_read_than_an_answer_needs(archives: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").touch()
    names = [f"r-{number}" for number in range(MAX_RUNS + 5)]
    archives |= {name: Archive(name) for name in names}
    rows = [SimpleNamespace(run=SimpleNamespace(name=name, folder=tmp_path)) for name in names]
    store: Any = SimpleNamespace(iterate_runs=lambda *, tasks: rows)
    with ExitStack() as stack:
        found = open_archives(store, "digits_resnet", None, False, stack)
    assert [archive.run["name"] for archive in found] == names[:MAX_RUNS]


# --- the question -----------------------------------------------------------------------------------------------------


def test_a_question_has_the_facts_of_its_task_and_of_the_first_run() -> None:
    task = load_catalog()["digits_resnet"]
    base = Archive(
        network=PROBED,
        timings={"validation": {"rank0": 10.0}},
        details={
            "peak_memory_bytes": 3 << 30,
            "precision": "bf16",
            "goals": {"light": {"samples": 2000, "threshold": 70.0}},
        },
        spec={"cluster_kind": "gke/n1-standard-4"},
        rank={"device": "cuda", "device_name": "Tesla T4"},
    )  # fmt: skip
    found = ask(base)
    assert (found.task, found.calibration.batch, found.link) == ("digits_resnet", 32, LINK)
    assert found.calibrated == Calibrated(1, "Tesla T4", 128.0, "bf16", machine="gke/n1-standard-4", link=LINK)
    assert (found.validation, found.memory_gib, found.devices) == (10.0, 3.0, task.devices)
    assert (found.samples.at, found.samples.known) == (64, pytest.approx(5000))
    assert list(found.methods) == [(resolve("bsp"), 1.0)]
    assert list(found.others) == []
    assert found.max_rank_batch == task.parameters["batch_size"].max
    assert found.can_resume is ("checkpoint" in task.parameters)
    # The light goal takes 2,000 of 5,000 samples, and so as large a part of the validations.
    assert ask(base, goal="light").validation == pytest.approx(4.0)


def test_what_a_run_does_not_tell_is_left_open() -> None:
    found = ask(Archive(rank={"device": "cpu", "device_name": "Xeon"}, samples=None, details={
        "goals": {"full": {"samples": 5000, "threshold": 80.0}}
    }))  # fmt: skip
    assert (found.link, found.memory_gib, found.validation) == (None, None, 0.0)
    assert found.calibrated == Calibrated(1, "", 128.0, "fp32", machine="", link=None)


def test_other_calibrated_runs_tell_of_other_machines() -> None:
    slow = {**CALIBRATION, "batch": 16}
    found = ask(
        Archive(),
        Archive("plain-2", None),
        Archive("slow-2", slow, network=PROBED, spec={"cluster_kind": "eks/m7i.large"}),
    )
    assert list(found.others) == [Calibrated(1, "", 64.0, "fp32", machine="eks/m7i.large", link=LINK)]


def test_runs_with_another_goal_are_not_mixed() -> None:
    other = Archive("far-2", goal={"kind": "full", "threshold": 90.0})
    with pytest.raises(UsageError, match=r"The goals of far-2 and cal-2 differ\.") as caught:
        ask(Archive(), other)
    assert caught.value.hint == "Leave it out of --from"
    light = {"goals": {"light": {"samples": 2000, "threshold": 70.0}}}
    assert ask(Archive(details=light), Archive("far-2", goal=other.result["goal"], details=light), goal="light")
    with pytest.raises(UsageError, match="differ"):
        ask(Archive(details=light), Archive("x-2", details={"goals": {}}), goal="light")


@pytest.mark.parametrize(("threads", "cores", "is_crowded"), [(1, 2.0, False), (2, 4.0, False), (2, 3.5, True)])
def test_a_calibration_whose_ranks_shared_cores_is_refused(threads: int, cores: float, is_crowded: bool) -> None:
    archive = Archive(calibration={**CALIBRATION, "threads": threads, "cores": cores})
    if not is_crowded:
        assert ask(archive).calibration.threads == threads
        return
    with pytest.raises(UsageError, match=r"cal-2 had 2 ranks of 2 threads on 3\.5 cores") as caught:
        ask(archive)
    assert caught.value.hint == "mlbench run cal 2 --task digits_resnet --calibrate --num-cpus 1"


# --- methods ----------------------------------------------------------------------------------------------------------


def names(found: Any) -> list[str]:
    return [method.name for method, _ in found.methods]


def test_methods_are_the_runs_own_and_the_usual_ones_or_those_that_are_asked_for() -> None:
    own = Archive(spec={"method": "wfbp"})
    assert names(ask(own, methods=None)) == ["wfbp", *DEFAULT_METHODS]
    assert names(ask(Archive(spec={"method": "dear"}), methods=None)) == ["dear", "fusion", "mgwfbp"]
    assert names(ask(own, methods="dear,bsp,dear")) == ["dear", "bsp"]
    assert names(ask(own, methods="any")) == [name for name in PRESETS if keeps_samples(resolve(name))]


def test_a_changed_method_of_the_run_is_used_as_it_was() -> None:
    changed = resolve("fusion", {"plan": "threshold:1MiB"})
    assert list(ask(Archive(spec={"method": changed.to_dict()}), methods="fusion").methods) == [(changed, 1.0)]


def test_methods_that_need_other_numbers_of_samples_are_used_as_runs_have_measured_it() -> None:
    """Twice and eight times as many samples: on the average, by their logarithms, four times."""
    lossy = [
        Archive(f"l-{number}", None, samples=5000 * factor, spec={"method": "dgc"})
        for number, factor in enumerate((2, 8))
    ]
    ((method, factor),) = ask(Archive(), *lossy, methods="dgc").methods
    assert (method.name, factor) == ("dgc", pytest.approx(4.0))
    assert "dgc" in names(ask(Archive(), *lossy, methods="any"))
    with pytest.raises(UsageError, match="dgc changes how many samples the goal takes, and no run shows") as caught:
        ask(Archive(), methods="dgc")
    assert caught.value.hint == "mlbench run dgc 2 --task TASK --method dgc, then: --from dgc-2"
    # Nothing is known of other batch sizes, so nothing follows from a run with one.
    far = Archive("far", None, details={"global_batch": 512}, spec={"method": "dgc"})
    with pytest.raises(UsageError, match="no run shows by how much"):
        ask(Archive(), far, methods="dgc")


def test_an_unknown_method_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r'There is no method "fussion"\. Did you mean "fusion"') as caught:
        ask(Archive(), methods="bsp,fussion")
    assert caught.value.hint == "mlbench methods"


# --- a cluster --------------------------------------------------------------------------------------------------------

DETAILS = {"nodes": 2, "machine_type": "n1-standard-4", "plan": {"price_per_hour": 0.5}}


def cluster_with(**changes: Any) -> Cluster:
    details = {key: value for key, value in {**DETAILS, **changes}.items() if value is not None}
    return Cluster("rel-2", "gke", details=details, account="project", location="us-central1-a")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is planned: the question and the offers."""
    asked: list[Any] = []

    def make_plan(found: Any, offers: Any) -> Any:
        asked.append((found, offers))
        return SimpleNamespace(best=["the best", "the second"])

    def make(task: Any, archives: Any, goal: Any, method: Any) -> Any:
        asked.append((task.name, archives, goal, method))
        return question(), None

    monkeypatch.setattr(module, "open_archives", lambda store, task, names, unproven, stack: (task, names, unproven))
    monkeypatch.setattr(module, "make_question", make)
    monkeypatch.setattr(module, "make_plan", make_plan)
    return asked


@pytest.mark.parametrize("is_new", [False, True])
def test_a_task_is_estimated_on_all_workers_at_the_price_of_the_cluster(planned: list[Any], is_new: bool) -> None:
    found: Any = estimate_on_cluster(None, "mnist", cluster_with(), "light", "fusion", is_new)  # type: ignore[arg-type]
    assert found == "the best"
    asked, (plan_question, (offer,)) = planned
    assert asked == ("mnist", ("mnist", None, False), "light", "fusion")
    assert plan_question == replace(question(), workers=(2,), batch_factors=(1.0,), is_started=not is_new)
    assert (offer.machine.kind, offer.machine.gpus) == ("gke/n1-standard-4", 0)
    assert (offer.region, offer.price, offer.control_plane) == ("us-central1-a", 0.25, 0.0)


@pytest.mark.parametrize(
    ("task", "changes", "message", "hint"),
    [
        ("mnits", {}, 'There is no task "mnits". Did you mean "mnist"?', "mlbench tasks"),
        ("mnist", {"machine_type": "n9"}, "The speed of n9 machines is not known, so nothing is", None),
        ("mnist", {"gpus_per_node": 7}, "The speed of n1-standard-4 machines is not known", None),
        ("mnist", {"nodes": None}, "The speed of n1-standard-4 machines is not known", None),
        ("mnist", {"plan": {}}, "The price of the cluster is not known.", "mlbench prices update gke"),
    ],
)  # fmt: skip
def test_a_cluster_of_which_too_little_is_known_is_not_planned(
    planned: list[Any], task: str, changes: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        estimate_on_cluster(None, task, cluster_with(**changes))  # type: ignore[arg-type]
    assert caught.value.message.startswith(message)
    assert caught.value.hint == hint
    assert planned == []


def test_a_machine_with_gpus_is_the_one_with_as_many(planned: list[Any]) -> None:
    estimate_on_cluster(None, "mnist", cluster_with(machine_type="a3-highgpu-8g", gpus_per_node=8))  # type: ignore[arg-type]
    _, (_, (offer,)) = planned
    assert (offer.machine.kind, offer.machine.gpus) == ("gke/a3-highgpu-8g", 8)


def test_runs_on_paid_clusters_are_predicted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def estimate(store: Any, task: str, cluster: Cluster, goal: Any, method: Any) -> Any:
        asked.append((task, cluster.details["nodes"], goal, method))
        if goal == "light":
            raise NotFoundError("There is no calibrated run.")
        return SimpleNamespace(seconds=10.0 * cluster.details["nodes"])

    monkeypatch.setattr(module, "estimate_on_cluster", estimate)
    predict = predictor(None)  # type: ignore[arg-type]
    cluster = cluster_with()
    fused = spec(task="mnist", workers=4, method={"name": "fusion"})
    assert [predict(fused, cluster), predict(replace(fused, seed=7, name="x-4"), cluster)] == [40.0, 40.0]
    assert predict(spec(task="mnist", workers=3), cluster) == 30.0
    assert [predict(spec(task="mnist", goal="light"), cluster) for _ in range(2)] == [None, None]
    assert predict(fused, replace(cluster, location="europe-west4-a")) == 40.0
    assert asked == [
        ("mnist", 4, "full", "fusion"),
        ("mnist", 3, "full", None),
        ("mnist", 2, "light", None),
        ("mnist", 4, "full", "fusion"),
    ]
    unpriced = (cluster_with(plan=None), cluster_with(plan={"price_per_hour": None}))
    for free in (Cluster("local", "local"), *(replace(each, name="free") for each in unpriced)):
        assert predictor(None)(fused, free) is None  # type: ignore[arg-type]
    assert predict(spec(task="custom"), cluster) is None
    assert len(asked) == 4
