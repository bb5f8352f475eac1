"""Commands that stop, delete, list and verify, and what commands share: names for the shell, archives, repeats."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import api, console
from mlbench_cli.clusters import changes, manage
from mlbench_cli.commands import _archives, _machines, cancel, delete, delete_cluster, list_clusters, verify
from mlbench_cli.commands._archives import open_archives, open_reference
from mlbench_cli.commands._common import (
    complete_backends,
    complete_clusters,
    complete_presets,
    complete_runs,
    complete_tasks,
    make_folder,
    read_quietly,
)
from mlbench_cli.commands._machines import end_orphans, find_orphans, read_text_file
from mlbench_cli.commands._repeats import show_repeats
from mlbench_cli.commands._selection import act_on_each, complete_names, make_filter
from mlbench_cli.console import Format
from mlbench_cli.engines.machines import engine as machines
from mlbench_cli.errors import (
    DamagedArchive,
    NotFoundError,
    UnprovenArchive,
    UnreachableError,
    UsageError,
)
from mlbench_cli.model.run import Cluster, Experiment, Member, Outcome
from mlbench_cli.results import receipts
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.archive.sign import OriginError, Signer
from mlbench_cli.results.archive.verify import Problem, Verification
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import load_catalog
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]
CONTEXT: Any = SimpleNamespace()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLBENCH_CLUSTER", raising=False)
    return tmp_path


# --- names for the shell ----------------------------------------------------------------------------------------------


def test_names_of_the_store_are_completed() -> None:
    store = Store()
    runs = [store.record_run(spec(name, 1)) for name in ("demo-1", "demo-2-r1", "demo-2-r2", "other-1")]
    store.record_experiment(Experiment("e1", "demo", "2026-01-01T00:00:00Z", {}, (Member(0, runs[0].id, "h"),)), ())
    store.record_cluster(Cluster("lab", "kind"))
    assert complete_runs("demo-2") == ["demo-2-r1", "demo-2-r2", "demo-2"]
    assert complete_runs("x") == []
    assert set(complete_names("d")) == {"demo", "demo-1", "demo-2", "demo-2-r1", "demo-2-r2"}
    assert len(complete_names("")) == 6
    assert set(complete_clusters("l")) == {"local", "lab"}
    assert complete_clusters("la") == ["lab"]


def test_a_store_that_cannot_be_read_completes_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("MLBENCH_HOME", str(home / "file"))
    assert read_quietly(lambda store: ["never"]) == []


def test_tasks_presets_and_backends_are_completed_for_the_line() -> None:
    catalog = load_catalog()
    assert complete_tasks("digits_") == [name for name in catalog if name.startswith("digits_")]
    line: Any = SimpleNamespace(params={"task": "digits_resnet"})
    empty: Any = SimpleNamespace(params={})
    task = catalog["digits_resnet"]
    assert complete_presets(line, "") == list(task.presets)
    assert set(complete_presets(empty, "")) == {preset for each in catalog.values() for preset in each.presets}
    assert len(complete_presets(empty, "spec")) == 1
    assert complete_backends(line, "") == [*task.backends, "custom:"]
    assert set(complete_backends(empty, "")) > set(complete_backends(line, ""))
    assert complete_backends(line, "cu") == ["custom:"]


def test_folders_are_made_or_the_reason_is_told(home: Path) -> None:
    folder = make_folder(home / "a" / "b")
    assert folder.is_dir()
    assert make_folder(folder) == folder
    (home / "file").touch()
    with pytest.raises(UsageError, match=r"The folder .*file/x cannot be created: Not a directory\."):
        make_folder(home / "file" / "x")
    with pytest.raises(UsageError, match=r"cannot be created: .*null"):
        make_folder(Path("a\0b"))


# --- which runs -------------------------------------------------------------------------------------------------------


def test_a_filter_has_ages_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_767_225_600.0)  # 2026-01-01T00:00:00Z
    found = make_filter(["failed"], ["mnist"], "7d", "2025-12-31T23:00:00Z")
    assert (found.states, found.tasks) == (("failed",), ("mnist",))
    assert (found.older_than, found.newer_than) == (7 * 86400.0, 3600.0)
    future = make_filter(None, None, None, "2026-01-02T00:00:00Z")
    assert (future.states, future.tasks, future.older_than, future.newer_than) == ((), (), None, 0.0)
    with pytest.raises(UsageError, match="--older-than"):
        make_filter(None, None, "old")


def test_one_run_that_fails_does_not_stop_the_others(capsys: Captured) -> None:
    errors = {"a": UsageError("Wrong."), "c": UnreachableError("Far away.")}

    def act(run: Any) -> str:
        if run.name in errors:
            raise errors[run.name]
        return str(run.name)

    runs: Any = [SimpleNamespace(name=name) for name in "abcd"]
    assert act_on_each(runs, act, is_only=False) == (["b", "d"], errors["c"])  # the one with the highest exit code
    assert capsys.readouterr().err == "Warning: a: Wrong.\nWarning: c: Far away.\n"
    assert act_on_each(runs[1:2], act, is_only=True) == (["b"], None)
    with pytest.raises(UsageError):
        act_on_each(runs[:1], act, is_only=True)


# --- archives ---------------------------------------------------------------------------------------------------------


class Opened:
    """An archive that is open."""

    def __init__(self, path: Path, not_derived: Sequence[str] = ()) -> None:
        self.path, self.not_derived, self.is_open = path, not_derived, True

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Archives by name: "damaged" and "unproven" are refused, the latter unless asked for."""
    asked: list[Any] = []

    def open_verified(path: Path, *, unproven: bool) -> Opened:
        asked.append((path.name, unproven))
        if path.name == "damaged":
            raise DamagedArchive(path, "run.json", "it was changed")
        if path.name == "unproven" and not unproven:
            raise UnprovenArchive(path, ["The log is missing."])
        return Opened(path, ["The log is missing.", "So is time."] if path.name == "unproven" else ())

    monkeypatch.setattr(_archives, "open_verified", open_verified)
    return asked


def test_archives_are_closed_with_their_stack(verified: list[Any], capsys: Captured) -> None:
    with ExitStack() as stack:
        found: Any = open_archives([Path("a"), Path("b")], stack)
        assert [(each.path.name, each.is_open) for each in found] == [("a", True), ("b", True)]
    assert [each.is_open for each in found] == [False, False]
    assert verified == [("a", False), ("b", False)]
    assert capsys.readouterr().err == ""


def test_an_archive_that_was_named_must_be_fine(verified: list[Any], capsys: Captured) -> None:
    with ExitStack() as stack:
        for name, kind in (("damaged", DamagedArchive), ("unproven", UnprovenArchive)):
            with pytest.raises(kind):
                open_archives([Path("a"), Path(name)], stack)
        (found,) = open_archives([Path("unproven")], stack, unproven=True)
    assert found.path == Path("unproven")
    assert capsys.readouterr().err == "Warning: unproven is unproven. The log is missing. So is time.\n"


def test_archives_that_nobody_named_may_be_left_out_but_not_all(verified: list[Any], capsys: Captured) -> None:
    left_out: list[str] = []
    with ExitStack() as stack:
        found = open_archives([Path("damaged"), Path("unproven"), Path("a")], stack, left_out=left_out)
        assert [str(each.path) for each in found] == ["a"]
        assert left_out[0] == "left out, damaged: damaged: run.json: it was changed"
        assert left_out[1].startswith("left out, unproven: ")
        assert capsys.readouterr().err.splitlines() == [f"Warning: {line}" for line in left_out]
        with pytest.raises(DamagedArchive):  # the first refusal
            open_archives([Path("damaged"), Path("unproven")], stack, left_out=[])
        assert open_archives([], stack, left_out=[]) == []


def test_a_reference_is_one_run(verified: list[Any]) -> None:
    client: Any = SimpleNamespace(find_archives=lambda words: [Path(words[0])] * (2 if words == ["demo"] else 1))
    with ExitStack() as stack:
        assert open_reference(client, None, "--compute", stack, unproven=False) is None
        found = open_reference(client, "unproven", "--compute", stack, unproven=True)
        assert found is not None
        assert found.path == Path("unproven")
        with pytest.raises(UsageError, match="--compute demo is 2 runs; it must be one"):
            open_reference(client, "demo", "--compute", stack, unproven=False)


# --- repeats ----------------------------------------------------------------------------------------------------------


def repeats(name: str, good: int, total: int, **fields: Any) -> Any:
    estimate = Estimate(3, 10.0, 9.0, 11.0)
    point = {
        "workers": 2, "good": [None] * good, "seconds": estimate, "value": Estimate(3, 80.0, 79.0, 81.0),
        "throughput": Estimate(3, 1000.0, 900.0, 1100.0), "race": None, "without_compiling": None, **fields,
    }  # fmt: skip
    return SimpleNamespace(name=name, total=total, metric="Prec@1", unit="%", point=SimpleNamespace(**point))


def test_repeats_are_a_table_with_intervals(capsys: Captured) -> None:
    show_repeats([])
    assert capsys.readouterr() == ("", "")
    show_repeats(
        [
            repeats("a-2", 3, 3),
            repeats("b-2", 2, 3, value=None, throughput=None),
            repeats("c-2", 0, 3),
            repeats("d-2", 3, 3, race="It is won.", without_compiling=Estimate(1, 5.0)),
        ]
    )
    printed = capsys.readouterr()
    lines = [line.replace("\u00a0", " ") for line in printed.out.splitlines()]
    assert lines[0] == ""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]
    assert cells == [
        ["REPEATS", "WORKERS", "RUNS", "TIME", "METRIC", "THROUGHPUT"],
        ["a-2", "2", "3", "10.0 s (9.0 to 11.0)", "Prec@1 80.0 % (79.0 to 81.0)", "1.00k samples/s (0.90k to 1.10k)"],
        ["b-2", "2", "2 of 3", "10.0 s (9.0 to 11.0)", "-", "-"],
        ["c-2", "2", "0 of 3", "-", "-", "-"],
        ["d-2", "2", "3", "10.0 s (9.0 to 11.0)", "Prec@1 80.0 % (79.0 to 81.0)", "1.00k samples/s (0.90k to 1.10k)"],
        ["d-2: It is won."],
        ["d-2: time without compiling: 5.00 s"],
    ]
    assert printed.err.startswith("In parentheses: the 95 % interval of the mean")


# --- machines ---------------------------------------------------------------------------------------------------------


def test_files_of_options_are_read_or_the_reason_is_told(home: Path) -> None:
    file = home / "x"
    file.write_text("é\n")
    assert read_text_file(file, "--setup") == "é\n"
    with pytest.raises(NotFoundError, match=r"^--setup: the file .*none does not exist"):
        read_text_file(home / "none", "--setup")
    file.write_bytes(b"\xff")
    for bad in (file, home, Path("a\0b")):
        with pytest.raises(UsageError, match=r"^--setup .* it cannot be read as text"):
            read_text_file(bad, "--setup")


def test_processes_without_agents_are_looked_for_on_attached_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    ended: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def list_orphans(self) -> list[str]:
            if self.name == "far":
                raise UnreachableError("No answer.")
            return [f"orphan of {self.name}"]

        def end_orphans(self) -> None:
            ended.append(self.name)

    monkeypatch.setattr(machines, "MachinesEngine", Engine)
    monkeypatch.setattr(_machines, "connect_engine", lambda cluster: Engine(cluster.name))
    store = Store()
    for name, provider in (("lab", "slurm"), ("far", "hosts"), ("farm", "hosts"), ("cloud", "gke")):
        store.record_cluster(Cluster(name, provider))
    found: Any = find_orphans(store, None)
    assert set(found) == {"orphan of lab", "orphan of farm"}
    assert capsys.readouterr().err == "Warning: far was not searched: No answer.\n"
    found = find_orphans(store, ["slurm", "gke"])
    assert found == ["orphan of lab"]
    end_orphans(store, ["hosts"])
    assert sorted(ended) == ["far", "farm"]
    end_orphans(store, [])
    assert sorted(ended) == ["far", "far", "farm", "farm", "lab"]


# --- cancel and delete ------------------------------------------------------------------------------------------------


class Run:
    """A run that records the calls made on it."""

    def __init__(self, name: str, *, finished: bool = False, started: bool = True, error: Any = None) -> None:
        self.name, self.folder, self.is_started, self.error = name, Path("/data", name), started, error
        self.run = SimpleNamespace(id=f"id-{name}")
        self.finished = SimpleNamespace(outcome=Outcome.FAILED) if finished else None
        self.done: list[Any] = []

    @property
    def is_finished(self) -> bool:
        return self.finished is not None

    def cancel(self) -> Any:
        self.done.append("canceled")
        return SimpleNamespace(outcome=Outcome.CANCELLED, summary=f"{self.name} was stopped.")

    def delete(self, *, force: bool, warn: Any) -> None:
        if self.error is not None:
            raise self.error
        self.done.append(("deleted", force))


class Chosen:
    """An experiment with all runs, and whether its queue is alive."""

    def __init__(self, runs: Sequence[Run], is_under_way: bool = False) -> None:
        self.name, self.members, self.is_under_way = "demo", runs, is_under_way
        self.stopped: list[str] = []

    def runs(self) -> Sequence[Run]:
        return self.members

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Lets commands choose these runs; the list is what they asked for."""

    def prepare(*runs: Run, experiments: Sequence[Chosen] = ()) -> list[Any]:
        asked: list[Any] = []

        class Client:
            def __init__(self, notice: Any) -> None:
                pass

            def select(self, names: Any, *, all_runs: bool, filter: Any, readable: bool = True) -> Any:
                asked.append((tuple(names), all_runs, filter.states, filter.tasks, readable))
                return SimpleNamespace(runs=runs, experiments=experiments)

        monkeypatch.setattr(cancel, "Client", Client)
        monkeypatch.setattr(delete, "Client", Client)
        return asked

    return prepare


def test_runs_that_have_ended_are_not_canceled_unless_one_was_named(
    choosing: Callable[..., list[Any]], capsys: Captured
) -> None:
    done, running = Run("a-1", finished=True), Run("b-1")
    asked = choosing(done, running)
    cancel.cancel(CONTEXT, ["a", "b"], states=["running"], tasks=["mnist"])
    assert asked == [(("a", "b"), False, ("running",), ("mnist",), True)]
    assert (done.done, running.done) == ([], ["canceled"])
    assert capsys.readouterr().out == "b-1 was stopped.\n"
    choosing(done)
    cancel.cancel(CONTEXT, ["a-1"], output=Format.json)
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "runs": [{"run": "a-1", "outcome": "failed", "folder": "/data/a-1"}]
    }  # fmt: skip


def test_an_experiment_is_stopped_before_its_runs(choosing: Callable[..., list[Any]], capsys: Captured) -> None:
    queued, alone = Run("a-1", started=False), Run("b-1", started=False)
    experiment = Chosen([queued])
    choosing(queued, alone, experiments=[experiment])
    cancel.cancel(CONTEXT, ["demo", "b-1"])
    assert experiment.stopped == ["mlbench cancel stopped it"]
    assert (queued.done, alone.done) == ([], ["canceled"])
    printed = capsys.readouterr()
    assert printed.out == "a-1 was not started.\nb-1 was stopped.\n"
    assert "Next: mlbench run demo to resume" in printed.err


def test_runs_are_deleted_after_a_question(
    choosing: Callable[..., list[Any]], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[Any] = []
    monkeypatch.setattr(console, "confirm", lambda text, *, yes: questions.append((text, yes)))
    runs = [Run("a-1"), Run("b-1", error=UsageError("It is running."))]
    asked = choosing(*runs)
    with pytest.raises(UsageError, match="It is running"):
        delete.delete(["a", "b"], yes=True)
    assert asked == [(("a", "b"), False, (), (), False)]
    assert questions == [("Remove 2 runs and their results (a-1, b-1)?", True)]
    assert runs[0].done == [("deleted", False)]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a-1 is deleted.\n", "Warning: b-1: It is running.\n")
    choosing()
    delete.delete(all_runs=True)
    assert capsys.readouterr().err == "No such run: nothing to delete.\n"
    assert len(questions) == 1


def test_an_experiment_that_is_running_is_deleted_by_force_only(
    choosing: Callable[..., list[Any]], capsys: Captured
) -> None:
    run = Run("a-1")
    experiment = Chosen([run], is_under_way=True)
    choosing(run, experiments=[experiment])
    with pytest.raises(UsageError, match='The experiment "demo" is running') as caught:
        delete.delete(["demo"], yes=True)
    assert caught.value.hint == "mlbench cancel demo, then: mlbench delete demo"
    assert (run.done, experiment.stopped) == ([], [])
    delete.delete(["demo"], force=True, yes=True, output=Format.json)
    assert (run.done, experiment.stopped) == ([("deleted", True)], ["mlbench delete stopped it"])
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "runs": [{"run": "a-1", "id": "id-a-1", "deleted": True, "folder": "/data/a-1"}]
    }  # fmt: skip


# --- clusters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def deleting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked and deleted."""
    told: list[Any] = []

    def do(store: Store, cluster: Cluster, *, keep_images: bool, check: Any) -> str:
        check(cluster)
        told.append((cluster.name, keep_images))
        return f"The cluster {cluster.name} is deleted."

    monkeypatch.setattr(delete_cluster, "delete_with_progress", do)
    monkeypatch.setattr(console, "confirm", lambda text, *, yes: told.append((text, yes)))
    return told


def test_a_cluster_is_deleted_after_a_question(deleting: list[Any], capsys: Captured) -> None:
    Store().record_cluster(Cluster("lab", "kind"))
    delete_cluster.delete_cluster(["lab"], keep_images=True, yes=True, output=Format.json)
    assert deleting == [("Delete the cluster lab (kind), everything on it?", True), ("lab", True)]
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "cluster": "lab", "deleted": True, "summary": "The cluster lab is deleted."
    }  # fmt: skip
    with pytest.raises(UsageError, match='The cluster "local" is this machine'):
        delete_cluster.delete_cluster(["local"])
    with pytest.raises(UsageError, match="3 words are given"):
        delete_cluster.delete_cluster(["a", "b", "c"])


def test_a_cluster_with_results_is_kept_also_if_they_appear_late(
    deleting: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    store.record_cluster(Cluster("lab", "attached"))

    def start_late(store: Store, cluster: Cluster, *, keep_images: bool, check: Any) -> str:
        store.record_run(spec("late-1", 1, cluster="lab", engine="kubernetes"))
        check(cluster)
        raise AssertionError("it must be kept")

    monkeypatch.setattr(delete_cluster, "delete_with_progress", start_late)
    with pytest.raises(UsageError, match=r'On the cluster "lab" are runs .* not been fetched: late-1') as caught:
        delete_cluster.delete_cluster(["lab"])
    assert caught.value.hint == "mlbench wait late-1   fetches them; --force discards them"
    with pytest.raises(UsageError, match="late-1"):
        delete_cluster.delete_cluster(["lab"])


def test_a_cluster_that_is_gone_is_no_error_the_second_time(
    deleting: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with pytest.raises(NotFoundError):
        delete_cluster.delete_cluster(["lab"])
    monkeypatch.setattr(changes, "was_deleted", lambda store, name: name == "lab")
    delete_cluster.delete_cluster(["lab"])
    assert capsys.readouterr().out == "The cluster lab has already been deleted.\n"
    assert deleting == []


def test_clusters_of_the_clouds_are_listed_beside_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    store = Store()
    store.choose_cluster(store.record_cluster(Cluster("lab", "gke", location="near", account="me")))
    found = [Cluster("lab", "gke", location="near"), Cluster("lab", "gke", location="far")]
    monkeypatch.setattr(manage, "discover_clusters", lambda names, scope: (found, {"eks": UsageError("No login.")}))
    list_clusters.list_clusters(CONTEXT)
    printed = capsys.readouterr()
    assert [line.split()[:3] for line in printed.out.splitlines()[1:]] == [["local", "local", "-"], ["lab", "*", "gke"]]
    assert printed.err == ""
    list_clusters.list_clusters(CONTEXT, cloud=True, output=Format.json)
    printed = capsys.readouterr()
    listed = [
        (each["name"], each["location"], each["current"], each["known"]) for each in json.loads(printed.out)["clusters"]
    ]
    assert listed == [("local", None, False, True), ("lab", "near", True, True), ("lab", "far", False, False)]
    assert printed.err == "Warning: eks was not searched: No login.\n"

    def fail(names: Any, scope: Any) -> Any:
        raise UsageError("No provider can be searched.")

    monkeypatch.setattr(manage, "discover_clusters", fail)
    list_clusters.list_clusters(CONTEXT, cloud=True)
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert printed.err == "Warning: the clouds was not searched: No provider can be searched.\n"


# --- verify -----------------------------------------------------------------------------------------------------------

FINE, UNKNOWN = Verification(()), Verification((), ("The log is missing.",))
CHANGED = Verification((Problem("changed", "run.json", "it was changed"),))
SIGNER = Signer("eva", "ED25519", "SHA256:abc")


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives are as their names say; receipts end with .json."""
    known = {"fine": FINE, "signed": FINE, "unknown": UNKNOWN, "changed": CHANGED}
    monkeypatch.setattr(api, "check_archive", lambda path: known[path.name])
    monkeypatch.setattr(receipts, "is_receipt", lambda path: path.suffix == ".json")
    monkeypatch.setattr(verify, "require_signers", lambda path: None)

    class Archive:
        @classmethod
        def open(cls, path: Path) -> Any:
            return Opened(path)

    def check_origin(archive: Opened, signers: Path) -> Signer:
        if archive.path.name != "signed":
            raise OriginError("It is not signed.", details={"problem": "unsigned"})
        return SIGNER

    monkeypatch.setattr(verify, "Archive", Archive)
    monkeypatch.setattr(verify, "check_origin", check_origin)


@pytest.mark.usefixtures("checking")
@pytest.mark.parametrize(
    ("names", "signers", "code"),
    [
        (["fine"], False, 0),
        (["fine", "unknown"], False, 9),
        (["unknown", "changed"], False, 2),
        (["signed"], True, 0),
        (["signed", "fine"], True, 3),
        (["fine", "changed"], True, 2),
        (["fine", "unknown"], True, 3),
        ([], False, 0),
    ],
)
def test_what_is_not_proven_is_the_exit_code(capsys: Captured, names: list[str], signers: bool, code: int) -> None:
    paths = [Path(name) for name in names]
    assert verify.verify(paths, Path("signers") if signers else None) == code
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == names


@pytest.mark.usefixtures("checking")
def test_receipts_are_judged_with_the_archives_that_verify(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    asked: list[Any] = []

    def judge(papers: list[Path], archives: list[Path], signers: Path | None) -> list[Any]:
        asked.append((papers, archives, signers))
        return [] if not papers else [receipt]

    receipt: Any = SimpleNamespace(
        checked=SimpleNamespace(problems=(), is_derived=False), origin_error=None, to_dict=lambda: {"receipt": "r"}
    )
    monkeypatch.setattr(verify, "_judge_receipts", judge)
    monkeypatch.setattr(verify, "_show_receipt", lambda found: None)
    assert verify.verify([Path("r.json"), Path("fine"), Path("unknown")]) == 9
    assert asked == [([Path("r.json")], [Path("fine")], None)]
    assert verify.verify([Path("r.json"), Path("fine")]) == 9
    receipt.checked.is_derived = True
    assert verify.verify([Path("r.json"), Path("fine")]) == 0
    receipt.origin_error = OriginError("x")
    assert verify.verify([Path("r.json"), Path("fine")], Path("signers")) == 3
    receipt.checked.problems = ("x",)
    capsys.readouterr()
    assert verify.verify([Path("r.json"), Path("fine")], output=Format.json) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["receipts"], len(document["archives"])) == ([{"receipt": "r"}], 1)
    verify.verify([Path("fine")], output=Format.json)
    assert "receipts" not in json.loads(capsys.readouterr().out)
