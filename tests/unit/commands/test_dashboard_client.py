"""The everyday commands against a shared dashboard: what they ask it, wait for, print and write."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from mlbench_cli.commands._dashboard import (
    cancel_runs,
    choose_files,
    download_runs,
    find_runs,
    require_names,
    show_clusters,
    show_logs,
    show_status,
    start_run,
    wait_for,
)
from mlbench_cli.console import Format
from mlbench_cli.errors import DeadlineError, Interrupted, NotFoundError, UnreachableError, UsageError
from mlbench_cli.runs.request import Request

Captured = pytest.CaptureFixture[str]


def a_run(name: str = "demo-2", **changes: Any) -> dict[str, Any]:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "value": 80.5}
    plain = {
        "name": name, "state": "finished", "outcome": "goal_reached", "workers": 2, "world_size": 2, "goal": goal,
        "progress": {"elapsed": 6.17, "phase": "training"}, "created": "2026-01-02T00:00:00Z", "metrics": {},
        "findings": [],
    }  # fmt: skip
    return {**plain, **changes}


class Dashboard:
    """A dashboard whose answers to a path come one after the other; the last one stays."""

    host = "board"

    def __init__(self) -> None:
        self._answers: dict[str, list[Any]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def add(self, path: str, *answers: Any) -> "Dashboard":
        self._answers[path] = list(answers)
        return self

    def get(self, path: str, **query: Any) -> Any:
        self.asked.append((path, query))
        answers = self._answers.get(path)
        if not answers:
            raise NotFoundError(f"There is no {path}.")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def post(self, path: str, document: Any = None, **query: Any) -> Any:
        return self.get(path, document=document, **query)

    def download(self, name: str, target: Path) -> int:
        target.write_bytes(b"z" * 2048)
        return 2048


def board(answers: Mapping[str, Any]) -> Any:
    found = Dashboard()
    for path, answer in answers.items():
        found.add(path, *(answer if isinstance(answer, list) else [answer]))
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves; it has the seconds that were slept."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0 + sum(slept))
    return slept


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_is_that_of_a_run_or_of_all_runs_of_an_experiment() -> None:
    answers = {
        "runs/a-1": a_run("a-1"),
        "runs/b-1": a_run("b-1"),
        "experiments/b": {"members": [{"run": "b-1"}, {"run": None}, {}, {"run": "a-1"}]},
    }
    dashboard = board(answers)
    assert [run["name"] for run in find_runs(dashboard, ["a-1", "b"])] == ["a-1", "b-1"]
    assert [path for path, _ in dashboard.asked] == [
        "runs/a-1", "runs/b", "experiments/b", "runs/b-1", "runs/a-1"
    ]  # fmt: skip


def test_an_unknown_name_is_missed_as_a_run() -> None:
    with pytest.raises(NotFoundError, match="There is no runs/x"):
        find_runs(board({}), ["x"])


@pytest.mark.parametrize("name", ["a/b", "a\nb", "../x"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid run name"):
        require_names(["good-1", name], "wait")


def test_a_command_about_runs_needs_a_name() -> None:
    assert require_names(["a-1", "b"], "wait") == ["a-1", "b"]
    nobody: list[str] = []
    for names in (None, nobody):
        with pytest.raises(UsageError, match="No run given") as caught:
            require_names(names, "wait")
        assert caught.value.hint == "mlbench wait NAME --dashboard-url URL"


# --- status -----------------------------------------------------------------------------------------------------------


class Shown:
    """What `mlbench status` was given to show."""

    def __init__(self) -> None:
        self.one: list[Any] = []
        self.rows: list[Any] = []

    def __call__(self, dashboard: Any, *names: str, output: Format = Format.text, **options: Any) -> "Shown":
        asked = {"limit": 50, "state": None, "task": None, "since": None, **options}
        show_status(dashboard, names, output, show=self.one.append, show_rows=self.rows.append, **asked)
        return self


@pytest.mark.parametrize(("limit", "asked"), [(50, 50), (1, 1), (0, 1000), (1000, 1000), (1001, 1000)])
def test_a_list_of_runs_is_limited_to_what_the_dashboard_gives(limit: int, asked: int) -> None:
    dashboard = board({"runs": {"runs": [a_run()]}})
    shown = Shown()(dashboard, limit=limit, state="failed", task="x")
    assert dashboard.asked == [("runs", {"limit": asked, "state": "failed", "task": "x"})]
    assert (shown.rows, shown.one) == ([[a_run()]], [])


def test_runs_since_a_moment() -> None:
    days = [a_run(f"a-{day}", created=f"2026-01-0{day}T00:00:00Z") for day in (1, 2, 3)]
    shown = Shown()(board({"runs": {"runs": days}}), since=1767312000.0)  # 2026-01-02
    assert [run["name"] for run in shown.rows[0]] == ["a-2", "a-3"]


def test_one_run_is_shown_without_the_folder_of_another_machine() -> None:
    shown = Shown()(board({"runs/demo-2": a_run(folder="/data/demo-2")}), "demo-2")
    assert shown.one == [a_run(folder=None)]
    dashboard = board({"runs/a-1": a_run("a-1"), "runs/b-1": a_run("b-1")})
    assert Shown()(dashboard, "a-1", "b-1").rows == [[a_run("a-1"), a_run("b-1")]]


def test_a_list_of_one_run_is_a_list(capsys: Captured) -> None:
    assert Shown()(board({"runs": {"runs": [a_run()]}})).rows == [[a_run()]]
    Shown()(board({"runs": {"runs": [a_run()]}}), output=Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "runs": [a_run()]}
    Shown()(board({"runs/demo-2": a_run()}), "demo-2", output=Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, **a_run()}


def test_no_runs_are_said(capsys: Captured) -> None:
    shown = Shown()(board({"runs": {"runs": []}}))
    assert (shown.one, shown.rows) == ([], [])
    assert capsys.readouterr().err == "board has no such runs.\n"


def test_a_metric_is_of_one_run() -> None:
    metrics = {"val_Prec@1": 80.5}
    shown = Shown()(board({"runs/demo-2": a_run(metrics=metrics)}), "demo-2", metric="Prec@1")
    assert shown.one[0]["metric"] == {"name": "Prec@1", "value": 80.5}
    with pytest.raises(UsageError, match="--metric is about one run"):
        Shown()(board({"runs": {"runs": [a_run(), a_run()]}}), metric="Prec@1")


def test_watching_waits_for_the_end(clock: list[float]) -> None:
    dashboard = board({"runs/demo-2": [a_run(state="running"), a_run(state="running"), a_run()]})
    shown = Shown()(dashboard, "demo-2", watch=True)
    assert shown.one[0]["state"] == "finished"
    assert clock == [2.0, 2.0]
    assert Shown()(board({"runs/demo-2": a_run(state="running")}), "demo-2").one[0]["state"] == "running"


@pytest.mark.parametrize("answer", [{}, {"runs": 3}, {"runs": [{"name": "x"}]}, []])
def test_an_answer_of_another_version_is_explained(answer: Any) -> None:
    with pytest.raises(UnreachableError, match="board sent an answer that this mlbench does not understand") as caught:
        Shown()(board({"runs": [answer]} if answer else {"runs": {}}), since=1.0)
    assert caught.value.hint == "Use the mlbench version of the dashboard."


def test_clusters_of_a_dashboard(capsys: Captured) -> None:
    clusters = [{"name": "local", "provider": "local", "state": "ready"}]
    show_clusters(board({"clusters": {"clusters": clusters}}), Format.text)
    assert capsys.readouterr().out == "CLUSTER  PROVIDER  STATE\nlocal    local     ready\n"
    show_clusters(board({"clusters": {"clusters": clusters}}), Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "clusters": clusters}


# --- logs -------------------------------------------------------------------------------------------------------------


class Paper:
    """Has the lines of ranks that were written, and "flush" where they were handed over."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.prefixed: list[bool] = []

    def __call__(self, prefixed: bool) -> "Paper":
        self.prefixed.append(prefixed)
        return self

    def write(self, rank: int, text: bytes) -> None:
        self.lines.append((rank, text))

    def flush(self) -> None:
        self.lines.append("flush")


class Logs(Dashboard):
    """A dashboard with logs in pages of two lines; `cut` of a page is where a line without its end begins."""

    def __init__(self, logs: dict[int, list[str]], *states: str, cut: int | None = None) -> None:
        super().__init__()
        self.add("runs/demo-2", *(a_run(state=state) for state in states or ("finished",)))
        self._logs, self._cut = logs, cut

    def get(self, path: str, **query: Any) -> Any:
        if path != "runs/demo-2/logs":
            return super().get(path, **query)
        self.asked.append((path, query))
        lines, offset = self._logs[query["rank"]], query["offset"]
        page = lines[offset : offset + 2]
        return {"lines": page, "end": offset + len(page), "size": len(lines), "cut": self._cut}


def read(dashboard: Logs, **options: Any) -> Paper:
    paper, asked = Paper(), {"rank": None, "follow": False, "raw": False, "tail": None, **options}
    show_logs(cast(Any, dashboard), ["demo-2"], Format.text, paper, **asked)
    return paper


LOGS = {0: ["a", "b", "c"], 1: ["d"]}


def test_logs_are_read_page_by_page_and_rank_by_rank() -> None:
    dashboard = Logs(LOGS)
    paper = read(dashboard)
    assert paper.lines == [(0, b"a\n"), (0, b"b\n"), (0, b"c\n"), (1, b"d\n"), "flush"]
    assert paper.prefixed == [True]
    assert [(query["rank"], query["offset"]) for path, query in dashboard.asked if path.endswith("logs")] == [
        (0, 0), (0, 2), (1, 0)
    ]  # fmt: skip


@pytest.mark.parametrize(("raw", "word"), [(True, "true"), (False, "false")])
def test_one_rank_has_no_prefix_and_may_be_raw(raw: bool, word: str) -> None:
    dashboard = Logs(LOGS)
    paper = read(dashboard, rank=1, raw=raw)
    assert (paper.prefixed, paper.lines) == ([False], [(1, b"d\n"), "flush"])
    assert dashboard.asked[-1][1]["raw"] == word


@pytest.mark.parametrize(
    ("tail", "lines"),
    [
        (0, []),
        (1, [(1, b"d\n")]),
        (2, [(0, b"c\n"), (1, b"d\n")]),
        (9, [(0, b"a\n"), (0, b"b\n"), (0, b"c\n"), (1, b"d\n")]),
    ],
)
def test_the_last_lines(tail: int, lines: list[Any]) -> None:
    assert read(Logs(LOGS), tail=tail).lines == [*lines, "flush"]


def test_bytes_that_are_no_text_come_through() -> None:
    assert read(Logs({0: ["caf\udce9"]}), rank=0).lines[0] == (0, b"caf\xe9\n")


def test_a_log_is_followed_until_the_run_ends(clock: list[float]) -> None:
    logs = {0: ["a"]}
    dashboard = Logs(logs, "running", "running", "finished")
    asked: list[int] = []
    original = dashboard.get

    def get(path: str, **query: Any) -> Any:
        if path == "runs/demo-2":
            asked.append(len(asked))
            logs[0] = ["a", "b", "c"][: len(asked)]
        return original(path, **query)

    dashboard.get = get  # type: ignore[method-assign]
    assert read(dashboard, rank=0, follow=True).lines == [
        (0, b"a\n"), "flush", (0, b"b\n"), "flush", (0, b"c\n"), "flush"
    ]  # fmt: skip
    assert clock == [2.0, 2.0]


def test_a_line_without_its_end_is_left_for_later(clock: list[float]) -> None:
    dashboard = Logs({0: ["a", "half"]}, "running", "running", "finished", cut=1)
    assert read(dashboard, rank=0, follow=True).lines.count((0, b"half\n")) == 2
    assert len(clock) == 2


def test_logs_as_documents(capsys: Captured) -> None:
    def lines(*names: str) -> Any:
        dashboard = Logs({0: ["a"], 1: ["b"]})
        for name in names:
            dashboard.add(f"runs/{name}", a_run(name, world_size=1))
            dashboard.add(f"runs/{name}/logs", {"lines": ["a"], "end": 1, "size": 1, "cut": None})
        show_logs(cast(Any, dashboard), names, Format.json, Paper(), rank=None, follow=False, raw=False, tail=None)
        return json.loads(capsys.readouterr().out)

    one = {"lines": [{"rank": 0, "text": "a"}]}
    assert lines("a-1") == {"schema_version": 1, "name": "a-1", **one}
    assert lines("a-1", "b-1") == {"schema_version": 1, "runs": [{"name": name, **one} for name in ("a-1", "b-1")]}


# --- waiting ----------------------------------------------------------------------------------------------------------


def wait(
    dashboard: Any, *names: str, timeout: float | None = None, require_goal: bool = False, output: Format = Format.text
) -> int:
    return wait_for(dashboard, names, output, timeout=timeout, require_goal=require_goal)


def test_the_ends_of_runs_are_a_table_with_the_highest_code(capsys: Captured) -> None:
    found = [{"summary": "Rank 1 was slow."}]
    answers = {
        "runs/a-1": a_run("a-1", workers=1, findings=found),
        "runs/b-2": a_run("b-2", outcome="failed", goal=None, progress=None),
    }
    assert wait(board(answers), "a-1", "b-2") == 7
    printed = capsys.readouterr()
    cells = [[each.strip() for each in line.split("  ") if each.strip()] for line in printed.out.splitlines()]
    assert cells == [
        ["RUN", "WORKERS", "OUTCOME", "GOAL", "TOTAL", "EXIT"],
        ["a-1", "1", "goal_reached", "Prec@1 80.5 % (>= 80)", "6.17 s", "0"],
        ["b-2", "2", "failed", "-", "-", "7"],
    ]
    assert printed.err == "a-1: Rank 1 was slow.\n"


def test_a_run_that_succeeded_can_be_downloaded_next(capsys: Captured) -> None:
    assert wait(board({"runs/demo-2": a_run()}), "demo-2") == 0
    assert capsys.readouterr().err == "Next: mlbench download demo-2 --dashboard-url URL\n"


def test_the_ends_of_runs_as_a_document(capsys: Captured) -> None:
    missed = a_run(outcome="goal_missed")
    assert wait(board({"runs/demo-2": missed}), "demo-2", require_goal=True, output=Format.json) == 7
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "runs": [{**missed, "exit_code": 7}]}


def test_a_run_that_has_ended_has_a_minute_to_complete_its_archive(clock: list[float], capsys: Captured) -> None:
    assert wait(board({"runs/demo-2": a_run(state="ended", outcome=None)}), "demo-2") == 8
    assert sum(clock) == 60.0
    assert "demo-2  " in capsys.readouterr().out
    clock.clear()
    assert wait(board({"runs/demo-2": [a_run(state="ended"), a_run(state="ended"), a_run()]}), "demo-2") == 0
    assert sum(clock) == 4.0


def test_a_damaged_run_is_not_waited_for(clock: list[float]) -> None:
    assert wait(board({"runs/demo-2": a_run(state="damaged")}), "demo-2") == 8
    assert clock == []


def test_a_timeout_names_the_runs_that_continue(clock: list[float]) -> None:
    names = ("a-1", "b-1", "c-1", "d-1", "e-1")
    dashboard = board({f"runs/{name}": a_run(name, state="finished" if name == "a-1" else "running") for name in names})
    with pytest.raises(DeadlineError) as caught:
        wait(dashboard, *names, timeout=5.0)
    assert caught.value.message == "4 of 5 runs have not ended after 5.0 s: b-1, c-1, d-1. They continue."
    assert caught.value.hint == f"mlbench wait {' '.join(names)} --dashboard-url URL"
    assert clock == [2.0, 2.0, 2.0]


def test_no_time_asks_once(clock: list[float]) -> None:
    with pytest.raises(DeadlineError, match="1 of 1 runs"):
        wait(board({"runs/demo-2": a_run(state="running")}), "demo-2", timeout=0.0)
    assert clock == []


def test_the_progress_of_a_run_that_is_waited_for(clock: list[float], capsys: Captured) -> None:
    answers = {
        "runs/a-1": [a_run("a-1", state="running", progress=None), a_run("a-1")],
        "runs/b-1": [a_run("b-1", state="running"), a_run("b-1")],
    }
    wait(board(answers), "a-1", "b-1")
    assert capsys.readouterr().err.splitlines()[0] == "a-1: running, and 1 more"
    wait(board({"runs/b-1": [a_run("b-1", state="running"), a_run("b-1")]}), "b-1")
    assert capsys.readouterr().err.splitlines()[0] == "b-1: training"
    assert clock == [2.0, 2.0]


def test_ctrl_c_stops_waiting_and_not_the_runs() -> None:
    with pytest.raises(Interrupted, match="Stopped waiting; the runs continue") as caught:
        wait(board({"runs/demo-2": [KeyboardInterrupt()]}), "demo-2")
    assert caught.value.hint == "mlbench wait demo-2 --dashboard-url URL"


# --- acting -----------------------------------------------------------------------------------------------------------

REQUEST = Request(name="demo", workers=(1, 2), task="digits_resnet")
STARTED = {"experiment": "demo", "runs": ["demo-1", "demo-2"]}


def start(dashboard: Any, *, detach: bool = False, dry_run: bool = False, output: Format = Format.text) -> int:
    return start_run(dashboard, REQUEST, output, detach=detach, dry_run=dry_run, require_goal=True)


def test_a_detached_run_prints_its_names_and_how_to_wait(capsys: Captured) -> None:
    dashboard = board({"runs": STARTED})
    assert start(dashboard, detach=True) == 0
    ((_, query),) = dashboard.asked
    assert query["check"] is None
    assert (query["document"]["name"], query["document"]["workers"]) == ("demo", [1, 2])
    printed = capsys.readouterr()
    assert printed.out == "demo-1\ndemo-2\n"
    assert printed.err == "Started on board. Next: mlbench wait demo --dashboard-url URL\n"


def test_a_dry_run_is_checked_there_and_not_started(capsys: Captured) -> None:
    dashboard = board({"runs": STARTED})
    assert start(dashboard, dry_run=True, output=Format.json) == 0
    assert dashboard.asked[0][1]["check"] == "true"
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"schema_version": 1, **STARTED}
    assert printed.err == ""


def test_a_run_is_followed_to_its_goal(capsys: Captured) -> None:
    answers = {
        "runs": STARTED,
        "experiments/demo": {"members": [{"run": "demo-1"}]},
        "runs/demo-1": a_run("demo-1", outcome="goal_missed"),
    }
    assert start(board(answers)) == 7
    assert capsys.readouterr().err.splitlines()[0] == (
        "Started on board: demo-1, demo-2. Ctrl-C stops waiting, not the runs."
    )


def test_runs_and_experiments_are_canceled(capsys: Captured) -> None:
    answers = {"runs/a-1/cancel": {"summary": "It was stopped."}, "experiments/b/cancel": {"state": "stopped"}}
    cancel_runs(board(answers), ["a-1", "b"], Format.text)
    assert capsys.readouterr().out == "a-1: It was stopped.\nCanceled the experiment b.\n"
    cancel_runs(board(answers), ["a-1", "b"], Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "runs": [*answers.values()]}


def test_one_run_is_one_file_and_several_are_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert choose_files(["a"], folder / "x.zip", force=False) == {"a": folder / "x.zip"}
    assert choose_files(["a"], tmp_path, force=False) == {"a": tmp_path / "a.zip"}
    assert choose_files(["a"], None, force=True) == {"a": Path("results.zip")}
    assert choose_files(["a", "b"], folder, force=False) == {"a": folder / "a.zip", "b": folder / "b.zip"}
    assert folder.is_dir()
    assert choose_files(["a", "b"], None, force=True) == {"a": Path("a.zip"), "b": Path("b.zip")}


def test_several_runs_do_not_fit_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "x.zip", tmp_path / "file"):
        with pytest.raises(UsageError, match="2 runs do not fit into one file") as caught:
            choose_files(["a", "b"], target, force=True)
        assert caught.value.hint == "Name a folder with --to."


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "b.zip").touch()
    with pytest.raises(UsageError, match=r"b\.zip exists"):
        choose_files(["a", "b"], tmp_path, force=False)
    assert len(choose_files(["a", "b"], tmp_path, force=True)) == 2


def test_a_downloaded_archive_is_named_with_its_size(tmp_path: Path, capsys: Captured) -> None:
    answers = {"runs/a-1": a_run("a-1"), "runs/b-1": a_run("b-1")}
    file = tmp_path / "a-1.zip"
    download_runs(board(answers), ["a-1"], tmp_path, force=False, as_json=False)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{file}\n", f"2.0 KiB. Next: mlbench verify {file}\n")
    download_runs(board(answers), ["a-1"], tmp_path, force=True, as_json=True)
    one = {"run": "a-1", "file": str(file), "format": "archive", "bytes": 2048}
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, **one}
    download_runs(board(answers), ["a-1", "b-1"], tmp_path, force=True, as_json=True)
    two = {**one, "run": "b-1", "file": str(tmp_path / "b-1.zip")}
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "runs": [one, two]}
