"""`charts`: which runs and clusters are drawn, what the first argument may be, and the question that it asks."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import console
from mlbench_cli.commands import charts as module
from mlbench_cli.commands.charts import _choose, _refuse_results, charts
from mlbench_cli.console import Format
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.figures import charts as figures
from mlbench_cli.results.figures import provisioning

Captured = pytest.CaptureFixture[str]


class Client:
    """A client with the finished runs "a-1" and "b-1" (newest first: "c-1", which is open, then "b-1"), the repeats
    "demo", and any cluster."""

    def runs(self, *, contains: str) -> list[Any]:
        found = [("c-1", False), ("b-1", True), ("a-1", True)]
        return [
            SimpleNamespace(name=name, is_sealed=is_sealed, folder=Path("runs", name))
            for name, is_sealed in found
            if contains in name
        ]

    def select(self, names: Sequence[str], *, repeats: bool = False) -> Any:
        if names != ["demo"]:
            raise NotFoundError("There is no run of that name.")
        return SimpleNamespace(runs=[SimpleNamespace(results=Path("runs", f"demo-{number}")) for number in (1, 2)])

    def find_cluster(self, name: str) -> str:
        return f"cluster {name}"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What is drawn: archives, folder and options, or clusters."""
    seen: list[Any] = []

    def open_archives(paths: Sequence[Path], stack: ExitStack, *, unproven: bool, left_out: Any) -> list[Any]:
        seen.append({"archives": [str(path) for path in paths], "unproven": unproven, "left_out": left_out})
        return ["opened"]

    def draw(opened: Any, folder: Path, **options: Any) -> list[Path]:
        seen[-1] |= {"opened": opened, "folder": folder, **options}
        return [folder / "x.png", folder / "x.svg"]

    def draw_clusters(clusters: Any, folder: Path) -> list[Path]:
        seen.append((clusters, folder))
        return [folder / "provisioning.png"]

    monkeypatch.setattr(module, "Client", Client)
    monkeypatch.setattr(module, "open_archives", open_archives)
    monkeypatch.setattr(figures, "draw", draw)
    monkeypatch.setattr(provisioning, "draw", draw_clusters)
    monkeypatch.setattr(console, "interactive", lambda: False)
    monkeypatch.chdir(tmp_path)
    return seen


PLAIN = {"unproven": False, "opened": ["opened"], "folder": Path("out"), "published": False, "foreign": ()}


def test_without_names_all_finished_runs_are_drawn_in_their_order(drawn: list[Any], capsys: Captured) -> None:
    charts(Path("out"))
    charts(Path("out"), filter="b")
    assert drawn == [
        {**PLAIN, "archives": ["runs/a-1", "runs/b-1"], "left_out": [], "min_runs": 1},
        {**PLAIN, "archives": ["runs/b-1"], "left_out": [], "min_runs": 1},
    ]
    assert capsys.readouterr().out.splitlines() == ["out/x.png", "out/x.svg"] * 2


def test_archives_and_runs_that_are_named_are_all_needed(drawn: list[Any], tmp_path: Path, capsys: Captured) -> None:
    charts(
        Path("out"), [Path("x.zip")], ["demo"], published=True, foreign=[Path("log")], min_runs=3, unproven=True,
        output=Format.json,
    )  # fmt: skip
    assert drawn == [
        {
            "archives": ["x.zip", "runs/demo-1", "runs/demo-2"],
            "unproven": True,
            "left_out": None,
            "opened": ["opened"],
            "folder": Path("out"),
            "published": True,
            "foreign": [Path("log")],
            "min_runs": 3,
        }
    ]
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "folder": str(tmp_path / "out"),
        "files": ["out/x.png", "out/x.svg"],
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"archives": [Path("x.zip")]}, "cannot be combined with ARCHIVE or --run"),
        ({"runs": ["demo"]}, "cannot be combined with ARCHIVE or --run"),
        ({"clusters": ["lab"]}, "--cluster draws clusters and cannot be combined"),
    ],
)
def test_a_filter_selects_finished_runs_only(drawn: list[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        charts(Path("out"), **options, filter="")
    assert drawn == []


@pytest.mark.parametrize(
    ("filter", "words"),
    [("x", 'There is no finished run with "x" in its name.'), ("c", 'There is no finished run with "c" in its name.')],
)
def test_no_finished_run_of_that_name(drawn: list[Any], filter: str, words: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        charts(Path("out"), filter=filter)
    assert (caught.value.message, caught.value.hint) == (words, "mlbench status")


def test_no_finished_run_at_all(drawn: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "runs", lambda self, *, contains: [])
    with pytest.raises(NotFoundError, match=r"^There is no finished run\.$"):
        charts(Path("out"))


def test_clusters_are_drawn_once_each(drawn: list[Any], capsys: Captured) -> None:
    charts(Path("out"), clusters=["lab", "far", "lab"])
    assert drawn == [(["cluster lab", "cluster far"], Path("out"))]
    assert capsys.readouterr().out == "out/provisioning.png\n"


@pytest.mark.parametrize(
    "options",
    [{"archives": [Path("x.zip")]}, {"runs": ["demo"]}, {"published": True}, {"foreign": [Path("log")]}],
)
def test_clusters_are_drawn_alone(drawn: list[Any], options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--cluster draws clusters and cannot be combined with archives, --run"):
        charts(Path("out"), clusters=["lab"], **options)
    assert drawn == []


def test_results_in_place_of_the_folder_are_refused(drawn: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    for folder in ("x.zip", "run"):
        with pytest.raises(UsageError, match=f"{folder} is an archive, not a folder for figures") as caught:
            charts(Path(folder))
        assert caught.value.hint == f"mlbench charts FOLDER {folder}"
    with pytest.raises(UsageError, match='"demo" is a run, not a folder for figures') as caught:
        charts(Path("demo"))
    assert caught.value.hint == "mlbench charts FOLDER --run demo; a folder of that name: ./demo/figures"
    assert drawn == []
    for place in ("other", "sub/demo", str(tmp_path / "demo")):
        _refuse_results(Path(place))
    (tmp_path / "demo").mkdir()
    _refuse_results(Path("demo"))  # a folder that exists is one


RUNS: Any = [SimpleNamespace(name=name) for name in ("a-1", "b-1", "c-1")]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Gives these answers one after the other; the list has the questions."""

    def prepare(*answers: str) -> list[str]:
        left, questions = list(answers), list[str]()

        def ask(question: str) -> str:
            questions.append(question)
            return left.pop(0)

        monkeypatch.setattr(console, "ask", ask)
        return questions

    return prepare


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("", ["a-1", "b-1", "c-1"]),
        ("all", ["a-1", "b-1", "c-1"]),
        ("0", ["a-1"]),
        ("2 0", ["c-1", "a-1"]),
        ("2,0 , 2", ["c-1", "a-1"]),
    ],
)
def test_runs_are_chosen_by_number(
    answering: Callable[..., list[str]], capsys: Captured, answer: str, names: list[str]
) -> None:
    answering(answer)
    assert [run.name for run in _choose(RUNS, ask=True)] == names
    assert capsys.readouterr().err == "   [0]  a-1\n   [1]  b-1\n   [2]  c-1\n [all]  all of them\n\n"


@pytest.mark.parametrize("answer", ["3", "-1", "a-1", "0 x", "٠", "1.0", "all 0"])
def test_another_answer_is_asked_for_again(answering: Callable[..., list[str]], capsys: Captured, answer: str) -> None:
    questions = answering(answer, "1")
    assert [run.name for run in _choose(RUNS, ask=True)] == ["b-1"]
    assert len(questions) == 2
    assert capsys.readouterr().err.endswith("\nEnter numbers from 0 to 2, or all.\n")


@pytest.mark.parametrize(("yes", "terminal", "asks"), [(False, True, True), (True, True, False), (False, False, False)])
def test_only_a_person_is_asked(
    drawn: list[Any],
    answering: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    yes: bool,
    terminal: bool,
    asks: bool,
) -> None:
    questions = answering("1")
    monkeypatch.setattr(console, "interactive", lambda: terminal)
    charts(Path("out"), yes=yes)
    assert drawn[0]["archives"] == (["runs/b-1"] if asks else ["runs/a-1", "runs/b-1"])
    assert len(questions) == asks
