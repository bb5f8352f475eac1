"""`mlbench reproduce`: margins, numbers of runs, the cluster that is made for them, and the verdict in words."""

import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.clusters.manage import CreationRequest, Ttl
from mlbench_cli.commands import _like_cluster
from mlbench_cli.commands import reproduce as module
from mlbench_cli.commands._like_cluster import describe_cluster, make_cluster
from mlbench_cli.commands.reproduce import _announce, _choose_count, _parse_margin, _print_plan, _show, _title
from mlbench_cli.console import Format
from mlbench_cli.errors import Interrupted, Terminated, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis import reproduction
from mlbench_cli.results.analysis.reproduction import Answer, Figure, NotTheSame, Repeats, Reproduction
from providers.base import Plan, PlanLine
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("text", "margin"), [("5%", 0.05), ("0.05", 0.05), ("+5%", 0.05), ("99.9%", 0.999), ("0.1%", 0.001), ("1%", 0.01)]
)
def test_a_margin_is_a_share_or_a_percentage(text: str, margin: float) -> None:
    assert _parse_margin(text) == pytest.approx(margin)


@pytest.mark.parametrize("text", ["0", "0%", "100%", "1", "-5%", "5", "much", "", "%", "nan", "inf%"])
def test_a_margin_is_between_nothing_and_everything(text: str) -> None:
    with pytest.raises(UsageError, match="is not between 0 and 100 %"):
        _parse_margin(text)


@pytest.mark.parametrize(
    "options",
    [{"repeat": "3"}, {"cluster": "lab"}, {"create": True}, {"data_dir": "/data"}, {"name": "x"}, {"dry_run": True}],
)
def test_judging_existing_runs_takes_no_options_about_new_ones(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("mlbench_cli.api.Client", lambda **_: None)
    with pytest.raises(UsageError, match="--with judges existing runs"):
        module.reproduce(cast(Any, None), ["a"], against=["b"], **options)


def test_a_cluster_is_made_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.api.Client", lambda **_: None)
    with pytest.raises(UsageError, match="--create makes a cluster, and --cluster names one"):
        module.reproduce(cast(Any, None), ["a"], create=True, cluster="lab")


# --- numbers of runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "count"), [("2", 2), ("20", 20), ("007", 7)])
def test_a_number_of_runs(text: str, count: int) -> None:
    assert _choose_count(text, [], [], 0.1) == count


@pytest.mark.parametrize("text", ["1", "21", "0", "-2", "many", "", "2.0", "٣", "10000000"])
def test_what_is_no_number_of_runs(text: str) -> None:
    with pytest.raises(UsageError, match="is neither auto nor a number from 2 to 20"):
        _choose_count(text, [], [], 0.1)


@pytest.mark.parametrize(
    ("margin", "warning"),
    [
        (None, ""),
        (0.1, ""),
        (0.125, "decide within 10 %; 12.5 % is probably feasible (--within).\n"),
        (1.0, "decide within 10 %.\n"),
        (0.99, "decide within 10 %; 99 % is probably feasible (--within).\n"),
    ],
)
def test_a_spread_that_is_too_wide_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, margin: float | None, warning: str
) -> None:
    asked: list[Any] = []

    def choose(*words: Any) -> Repeats:
        asked.append(words)
        return Repeats(7, margin)

    monkeypatch.setattr(reproduction, "choose_repeats", choose)
    original: list[Any] = ["a", "b", "c"]
    assert _choose_count("auto", original, ["time"], 0.1) == 7
    assert asked == [(original, ["time"], 0.1)]
    printed = capsys.readouterr().err.replace("\u00a0", " ")
    assert printed.endswith(warning)
    assert bool(printed) == bool(warning)
    assert not warning or printed.startswith("Warning: The 3 runs of the original differ too much")


def archive(name: str = "demo-2-r1", seconds: float | None = 60.0, **fields: Any) -> Any:
    run = {"name": name, "spec": spec(**fields).to_dict(), "spec_hash": "0123456789abcdef"}
    return SimpleNamespace(run=run, result={"wall_seconds": seconds}, environment={"ranks": {}})


@pytest.mark.parametrize(("name", "title"), [("demo-2-r1", "demo-2"), ("demo-2", "demo-2"), ("x-16-r12", "x-16")])
def test_repeats_are_called_by_what_they_have_in_common(name: str, title: str) -> None:
    assert _title([archive(name), archive("other")]) == title


def test_what_is_run_again_is_announced(capsys: Captured) -> None:
    original = [archive(seconds=None), archive(seconds=65.0), archive(seconds=60.0)]
    _announce([spec(), spec()], original, 0.05, ["time", "loss"])
    assert capsys.readouterr().err.replace("\u00a0", " ").splitlines() == [
        "Original: demo-2, 3 runs (unknown-task on local, 2 workers, gloo, cpu). "
        "Again: 2 runs of about 1 min 5 s each.",
        "It is reproduced if the two sides agree within 5 % in: time, loss.",
    ]


def test_planned_runs_as_table_and_document(capsys: Captured) -> None:
    specs = [spec("demo-2-r1", seed=7), spec("demo-2-r2", seed=8)]
    _print_plan(specs, ["time"], 0.1, Format.text)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["RUN", "TASK", "WORKERS", "CLUSTER", "SEED"],
        ["demo-2-r1", "unknown-task", "2", "local", "7"],
        ["demo-2-r2", "unknown-task", "2", "local", "8"],
    ]
    _print_plan(specs, ["time"], 0.1, Format.json)
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "runs": [{"name": f"demo-2-r{n}", "seed": 6 + n, "cluster": "local"} for n in (1, 2)],
        "figures": ["time"],
        "margin": 0.1,
    }


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "notes"),
    [
        ((NotTheSame("cores", "2", "4", True), NotTheSame("python", "3.13", "3.14", False)), True),
        ((NotTheSame("python", "3.13", "3.14", False),), False),
    ],
)
def test_the_verdict_in_words(capsys: Captured, facts: tuple[NotTheSame, ...], notes: bool) -> None:
    figures = (
        Figure("time to the goal", Answer.REPRODUCED, "", (10.0, 10.0), (10.5, 10.5), 1.05, 1.0, 1.1),
        Figure("loss", Answer.CANNOT_TELL, "", (0.25,), ()),
    )
    _show(Reproduction(Answer.CANNOT_TELL, "Too few runs.", 0.1, figures, facts, "one each"))
    printed = capsys.readouterr()
    lines = [[each.strip() for each in line.split("  ") if each.strip()] for line in printed.out.splitlines()]
    assert lines[:5] == [
        ["Cannot tell. Too few runs."],
        [],
        ["FIGURE", "ORIGINAL", "AGAIN", "RATIO (90 %)", "VERDICT"],
        [*lines[3][:3], "1.050× (1.000 to 1.100)", "reproduced"],
        [lines[4][0], lines[4][1], "-", "–", "cannot tell"],
    ]
    assert lines[7:] == [
        [f"{fact.name}{' *' if fact.matters else ''}", fact.original, fact.reproduction] for fact in facts
    ]
    told = printed.err.splitlines()
    assert told[-1] == "Sessions: one each."
    assert (len(told) == 2) == notes


# --- a cluster like the original's ------------------------------------------------------------------------------------


def on_cloud(kind: str | None = "gke/n1-standard-4", **fields: Any) -> Any:
    return archive(
        **{"engine": "kubernetes", "cluster": "lab", "task": "digits_resnet", "cluster_kind": kind, **fields}
    )


def device(original: Any, name: str) -> Any:
    original.environment = {"ranks": {"0": {"device_name": name}}}
    return original


@pytest.mark.parametrize(
    ("seconds", "runs", "hours"), [(0.0, 3, 1), (600.0, 3, 2), (1800.0, 1, 2), (1801.0, 1, 3), (None, 3, 1)]
)
def test_a_cluster_lives_for_twice_the_runs_and_an_hour(seconds: float | None, runs: int, hours: int) -> None:
    request = describe_cluster([on_cloud(seconds=0.0), on_cloud(seconds=seconds)], runs)
    assert request.ttl == Ttl(f"{hours}h", 3600.0 * hours)
    assert (request.nodes, request.release, request.name) == (2, "repro-01234567", "repro-01234567-2")
    assert request.options == {"machine_type": "n1-standard-4"}
    assert request.provider.name == "gke"


def test_gpus_are_added_where_they_are_not_part_of_the_machine() -> None:
    added = describe_cluster([device(on_cloud("gke/n1-standard-8", device="gpu", gpus_per_worker=1), "Tesla T4")], 2)
    assert added.options == {"machine_type": "n1-standard-8", "gpu_type": "t4", "num_gpus": 1}
    part = describe_cluster([device(on_cloud("gke/g2-standard-4", device="gpu", gpus_per_worker=1), "NVIDIA L4")], 2)
    assert part.options == {"machine_type": "g2-standard-4"}


def test_a_cluster_of_this_machine_costs_nothing_and_does_not_expire() -> None:
    request = describe_cluster([on_cloud("kind")], 2)
    assert (request.ttl, request.options) == (None, {})


@pytest.mark.parametrize("kind", [None, "attached/x", "slurm"])
def test_machines_that_nobody_makes_are_refused(kind: str | None) -> None:
    with pytest.raises(UsageError, match=r"The original ran on .*, and --create makes clusters of ") as caught:
        describe_cluster([on_cloud(kind)], 2)
    assert caught.value.hint == "Leave --create out, or name a cluster: --cluster NAME"


def test_a_command_of_an_author_is_not_started_elsewhere() -> None:
    with pytest.raises(UsageError, match="The original ran a command of its author"):
        describe_cluster([on_cloud(task="custom", preset="custom")], 2)


class Making:
    """Plans, makes and deletes a cluster without a cloud."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, price: float) -> None:
        self.done: list[str] = []
        cluster = Cluster("repro-2", "kind")
        plan = Plan((PlanLine("worker", 2, price),), "here")

        @contextmanager
        def planned(store: Any, request: Any) -> Any:
            yield SimpleNamespace(cluster=cluster, plan=plan)

        def create(store: Any, planned: Any) -> Cluster:
            self.done.append("made")
            return cluster

        def delete(store: Any, cluster: Cluster) -> str:
            self.done.append("deleted")
            return "It is deleted."

        monkeypatch.setattr(_like_cluster, "plan_cluster", planned)
        monkeypatch.setattr(_like_cluster, "create_with_progress", create)
        monkeypatch.setattr(_like_cluster, "delete_with_progress", delete)

    def use(self, error: BaseException | None = None, *, yes: bool = True, dry_run: bool = False) -> None:
        request = CreationRequest(cast(Any, None), 2, "repro", {}, ttl=Ttl("2h", 7200.0))
        with make_cluster(cast(Any, None), request, yes=yes, dry_run=dry_run) as cluster:
            self.done.append(f"used {cluster.name}")
            if error is not None:
                raise error


def test_a_cluster_is_deleted_after_its_runs(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    making = Making(monkeypatch, 0.5)
    making.use()
    assert making.done == ["made", "used repro-2", "deleted"]
    printed = capsys.readouterr().err
    assert "It is deleted after the runs, and expires after 2h." in printed
    assert printed.endswith("It is deleted.\n")


def test_a_cluster_is_deleted_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    making = Making(monkeypatch, 0.5)
    with pytest.raises(UsageError):
        making.use(UsageError("x"))
    assert making.done == ["made", "used repro-2", "deleted"]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt(), Interrupted("The run continues."), Terminated("x")])
def test_a_cluster_stays_for_its_runs_if_their_client_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, stopped: BaseException
) -> None:
    """Who follows a run turns Ctrl-C into an error that says that the run continues: it needs its cluster."""
    making = Making(monkeypatch, 0.5)
    with pytest.raises(type(stopped)):
        making.use(stopped)
    assert making.done == ["made", "used repro-2"]
    assert "The cluster repro-2 stays for its runs. To delete it: mlbench delete-cluster kind repro-2" in (
        capsys.readouterr().err
    )


def test_a_cluster_that_costs_money_is_confirmed_and_a_dry_run_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    making = Making(monkeypatch, 0.5)
    with pytest.raises(UsageError, match="Create the cluster repro-2, and delete it after the runs"):
        making.use(yes=False)
    assert making.done == []
    making.use(yes=False, dry_run=True)
    assert making.done == ["used repro-2"]
    free = Making(monkeypatch, 0.0)
    free.use(yes=False)
    assert free.done == ["made", "used repro-2", "deleted"]


# --- the command ------------------------------------------------------------------------------------------------------


class Reproducing:
    """What `reproduce` does with runs that need no time, and what it asks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        self.engine = "local"
        self.answer = Answer.REPRODUCED
        monkeypatch.setattr("mlbench_cli.api.Client", lambda **_: self)
        monkeypatch.setattr(module, "open_archives", lambda paths, stack: [f"archive {path}" for path in paths])
        for target, name in ((reproduction, "check_original"), (reproduction, "choose_figures")):
            monkeypatch.setattr(target, name, self._record(name))
        monkeypatch.setattr(reproduction, "judge_reproduction", self._judge)
        monkeypatch.setattr(module, "_title", lambda original: "demo-2")
        monkeypatch.setattr(module, "_announce", lambda *words: None)
        monkeypatch.setattr(module, "follow_all", self._record("follow_all"))
        monkeypatch.setattr("mlbench_cli.commands._images.require_images", self._record("require_images"))
        monkeypatch.setattr("mlbench_cli.results.receipts.make_receipt", self._record("make_receipt", {"verdict": "x"}))
        monkeypatch.setattr("mlbench_cli.results.receipts.write_receipt", self._record("write_receipt"))

    store = "store"
    cluster = "find"

    def _record(self, name: str, answer: Any = ...) -> Any:
        def record(*words: Any, **named: Any) -> Any:
            self.asked[name] = (*words, *named.values())
            return words[0] if answer is ... else answer

        return record

    def _judge(self, *words: Any) -> Reproduction:
        self.asked["judge"] = words
        return Reproduction(self.answer, "So it is.", 0.1, (), (), "one each")

    def find_archives(self, words: Any) -> Any:
        return list(words)

    def fetch_archive(self, url: str) -> str:
        return f"fetched {url}"

    def prepare_reproduction(self, first: Any, **options: Any) -> Any:
        self.asked["prepare"] = options
        specs = [spec("new-2-r1", engine=self.engine), spec("new-2-r2", engine=self.engine)]
        runs = [SimpleNamespace(folder=f"folder {each.name}") for each in specs]
        opened = SimpleNamespace(name="new", left=runs[1:], runs=runs, record=self._record("record", None))

        @contextmanager
        def open_launch(words: Any) -> Any:
            self.asked["open"] = words
            yield opened

        experiment = SimpleNamespace(name="new")
        return SimpleNamespace(
            specs=specs, experiment=experiment, is_known=True, render=self._record("render", None), open=open_launch
        )

    def run(self, *words: str, **options: Any) -> int:
        context: Any = SimpleNamespace(obj=["reproduce", *words])
        return module.reproduce(context, list(words), **{"repeat": "2", **options})


@pytest.fixture
def reproducing(monkeypatch: pytest.MonkeyPatch) -> Reproducing:
    return Reproducing(monkeypatch)


@pytest.mark.parametrize(("answer", "code"), [(Answer.REPRODUCED, 0), (Answer.DIFFERENT, 7), (Answer.CANNOT_TELL, 9)])
def test_new_runs_are_judged_and_the_answer_is_the_exit_code(
    reproducing: Reproducing, capsys: Captured, answer: Answer, code: int
) -> None:
    reproducing.answer = answer
    assert reproducing.run("a.zip", "https://x/b.zip", metric=["loss"], data_dir="/data", name="new") == code
    asked = reproducing.asked
    original = ["archive a.zip", "archive fetched https://x/b.zip"]
    assert asked["check_original"] == (original,)
    assert asked["choose_figures"] == (original, ["loss"])
    assert asked["prepare"] == {"name": "new", "repeats": 2, "cluster": None, "data_dir": "/data"}
    assert asked["render"] == (False,)
    assert asked["open"] == ("mlbench", "reproduce", "a.zip", "https://x/b.zip")
    assert asked["follow_all"][1:] == (False,)
    assert asked["judge"] == (original, ["archive folder new-2-r1", "archive folder new-2-r2"], 0.1, original)
    assert str(asked["write_receipt"][0]) == "new.json"
    assert "record" in asked
    assert "require_images" not in asked
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{answer.phrase[0].upper()}{answer.phrase[1:]}. So it is.\n")
    assert 'Resuming "new": 1 of 2 runs to do.' in printed.err
    assert "Receipt: new.json. Next: mlbench sign new.json --key FILE" in printed.err


def test_finished_runs_are_judged_without_starting_any(reproducing: Reproducing, capsys: Captured) -> None:
    assert reproducing.run("a.zip", repeat="auto", against=["b"], within="5%", output=Format.json) == 0
    assert reproducing.asked["judge"][1:3] == (["archive b"], 0.05)
    assert not reproducing.asked.keys() & {"prepare", "follow_all"}
    assert reproducing.asked["choose_figures"][1] == ()
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "receipt": "demo-2-repro.json", "verdict": "x"}


def test_a_dry_run_prints_the_plan_and_starts_nothing(reproducing: Reproducing, capsys: Captured) -> None:
    assert reproducing.run("a.zip", dry_run=True) == 0
    assert reproducing.asked["render"] == (True,)
    assert not reproducing.asked.keys() & {"follow_all", "write_receipt"}
    assert "new-2-r2" in capsys.readouterr().out


def test_images_are_needed_on_kubernetes(reproducing: Reproducing) -> None:
    reproducing.engine = "kubernetes"
    reproducing.run("a.zip", cluster="lab", receipt=None)
    assert reproducing.asked["require_images"][1] == "find"
    assert reproducing.asked["prepare"]["cluster"] == "lab"


def test_a_cluster_that_is_created_is_used(
    reproducing: Reproducing, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    @contextmanager
    def make(store: Any, request: Any, *, yes: bool, dry_run: bool) -> Any:
        reproducing.asked["make"] = (store, request, yes, dry_run)
        yield Cluster("made-2", "kind")

    monkeypatch.setattr(module, "make_cluster", make)
    monkeypatch.setattr(module, "describe_cluster", lambda first, count: ("like", first, count))
    reproducing.run("a.zip", create=True, yes=True)
    assert reproducing.asked["make"] == ("store", ("like", ["archive a.zip"], 2), True, False)
    assert reproducing.asked["prepare"]["cluster"] == "made-2"
    reproducing.asked.clear()
    capsys.readouterr()
    assert reproducing.run("a.zip", create=True, dry_run=True) == 0
    assert capsys.readouterr().err == "Nothing was created. 2 runs would start on made-2.\n"
    assert reproducing.asked["make"][2:] == (False, True)
    assert "prepare" not in reproducing.asked
