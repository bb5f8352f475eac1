"""Commands with --dashboard-url: what they ask the dashboard for, and which of their options it knows. And `help`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import commands
from mlbench_cli.commands import cancel, download, list_clusters, wait
from mlbench_cli.commands import help as help_module
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError

Captured = pytest.CaptureFixture[str]
CONTEXT: Any = SimpleNamespace()
URL = "http://127.0.0.1/?token=t"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What a dashboard is asked for: the known options, then the arguments."""
    seen: list[Any] = []

    def record(*arguments: Any, **options: Any) -> int:
        seen.append((arguments, options))
        return 7

    for module, name in (
        (cancel, "cancel_runs"),
        (list_clusters, "show_clusters"),
        (wait, "wait_for"),
        (download, "download_runs"),
    ):
        monkeypatch.setattr(module, "connect", lambda context, url, *known: (url, *known))
        monkeypatch.setattr(module, name, record)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    return seen


def test_runs_of_a_dashboard_are_canceled(asked: list[Any]) -> None:
    cancel.cancel(CONTEXT, ["a-1", "b-1"], dashboard=URL, output=Format.json)
    assert asked == [(((URL,), ["a-1", "b-1"], Format.json), {})]
    with pytest.raises(UsageError):
        cancel.cancel(CONTEXT, dashboard=URL)


def test_clusters_of_a_dashboard_are_listed(asked: list[Any]) -> None:
    list_clusters.list_clusters(CONTEXT, dashboard=URL)
    assert asked == [(((URL,), Format.text), {})]


def test_runs_of_a_dashboard_are_waited_for(asked: list[Any]) -> None:
    assert wait.wait(CONTEXT, ["a-1"], "90s", require_goal=True, dashboard=URL) == 7
    assert wait.wait(CONTEXT, ["a-1"], dashboard=URL, output=Format.json) == 7
    there = (URL, "timeout", "require_goal")
    assert asked == [
        ((there, ["a-1"], Format.text), {"timeout": 90.0, "require_goal": True}),
        ((there, ["a-1"], Format.json), {"timeout": None, "require_goal": False}),
    ]


def test_archives_of_a_dashboard_are_downloaded(asked: list[Any]) -> None:
    download.download(CONTEXT, ["a-1"], Path("x.zip"), output="json", force=True, dashboard=URL)
    download.download(CONTEXT, ["a-1", "b-1"], dashboard=URL)
    there = (URL, "to", "path", "force")
    assert asked == [
        ((there, ["a-1"], Path("x.zip")), {"force": True, "as_json": True}),
        ((there, ["a-1", "b-1"], None), {"force": False, "as_json": False}),
    ]
    with pytest.raises(UsageError):
        download.download(CONTEXT, dashboard=URL)


# --- help -------------------------------------------------------------------------------------------------------------


class Root:
    """The program, whose commands show their name as their help."""

    def __init__(self) -> None:
        self.command = self

    def get_command(self, root: "Root", name: str) -> Any:
        assert root is self
        return Shown(name)


class Shown:
    """A command; a context of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make_context(self, name: str, words: list[str], *, parent: Any, resilient_parsing: bool) -> "Shown":
        assert (name, words, resilient_parsing) == (self.name, [], True)
        return self

    def get_help(self, context: Any) -> str:
        return f"help of {self.name}"

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_help_is_about_a_topic_or_a_command(capsys: Captured) -> None:
    root = Root()
    context: Any = SimpleNamespace(find_root=lambda: root)
    help_module.show_help(context)
    assert capsys.readouterr().out == commands.help_text()
    help_module.show_help(context, "results")
    assert capsys.readouterr().out == commands.help_text("results")
    help_module.show_help(context, "gate")
    assert capsys.readouterr().out == "help of gate\n"
    with pytest.raises(UsageError) as caught:
        help_module.show_help(context, "gatee")
    assert caught.value.message == 'There is no topic or command "gatee". Did you mean "gate"?'
    assert caught.value.hint == "mlbench help"
