"""What the pages of the dashboard show: which runs, in which order, with which words, and who may act."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")

from starlette.responses import HTMLResponse

from mlbench_cli.errors import DamagedArchive, MlbenchError, NotFoundError, UnreachableError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.server import pages
from mlbench_cli.server.config import Role, ServerConfig
from tests.unit.server.asking import ask
from tests.unit.server.conftest import Ended

READ_ONLY = "This dashboard is read-only for you."


def respond(home: Path, path: str, role: Role = Role.READ, **config: Any) -> Any:
    return ask(pages.make_routes(ServerConfig(home, 8080, token="t", **config)), path, role=role)


def html(home: Path, path: str, role: Role = Role.READ, **config: Any) -> str:
    return bytes(respond(home, path, role, **config).body).decode()


class Shown(SimpleNamespace):
    """What a handler gives to its template."""

    template: str
    title: str
    status: int
    values: dict[str, Any]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """The last page that was rendered."""
    found = Shown()

    def render(_: Any, __: Any, template: str, title: str, status: int = 200, **values: object) -> HTMLResponse:
        found.template, found.title, found.status, found.values = template, title, status, values
        return HTMLResponse("", status)

    monkeypatch.setattr(pages, "render", render)
    return found


def handle(name: str, state: str = "running", cluster: str = "local", **more: Any) -> Any:
    """A run as a list gives it. `more`: fields of its status, or an error that asking for it raises."""

    def status() -> Any:
        if isinstance(error := more.get("error"), Exception):
            raise error
        return {"name": name, **more}

    spec = SimpleNamespace(cluster=cluster)
    row = SimpleNamespace(state=state)
    return SimpleNamespace(name=name, run=SimpleNamespace(id=name, name=name, spec=spec), row=row, status=status)


# --- the overview ---------------------------------------------------------------------------------------------------


def test_the_overview_of_the_first_page(ended: Ended, shown: Shown) -> None:
    respond(ended.home, "/")
    assert (shown.template, shown.title, shown.status) == ("overview.html.j2", "Runs", 200)
    rows = shown.values.pop("runs")
    assert [row["name"] for row in rows] == ["bad", "study-2", "study-1"]
    assert rows[0]["outcome"] == "failed"
    assert {key: rows[0][key] for key in ("goal", "seconds", "conditions", "problem")} == {
        "goal": None,
        "seconds": None,
        "conditions": None,
        "problem": None,
    }
    assert shown.values == {
        "offset": 0,
        "size": 50,
        "contains": "",
        "has_more": False,
        "total": 3,
        "state": "",
        "experiments": [],
        "is_whole": False,
        "is_open": True,
    }


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ("", ["bad", "study-2"], True),
        ("?offset=1", ["study-2", "study-1"], False),
        ("?offset=2", ["study-1"], False),
        ("?offset=3", [], False),
        ("?contains=study", ["study-2", "study-1"], False),
        ("?state=failed&state=", ["bad"], False),
        ("?task=", ["bad", "study-2"], True),
        ("?task=mnist", [], False),
    ],
)
def test_a_page_of_runs(
    ended: Ended, shown: Shown, monkeypatch: pytest.MonkeyPatch, query: str, names: list[str], has_more: bool
) -> None:
    monkeypatch.setattr(pages, "PAGE_SIZE", 2)
    respond(ended.home, f"/{query}")
    assert ([row["name"] for row in shown.values["runs"]], shown.values["has_more"]) == (names, has_more)
    assert (shown.values["size"], shown.values["total"]) == (2, 3)


def test_the_filter_of_the_overview_is_shown_again(ended: Ended, shown: Shown) -> None:
    respond(ended.home, f"/?contains={'x' * 101}&state=failed&state=running&offset=4")
    assert shown.values["contains"] == "x" * 100
    assert (shown.values["state"], shown.values["offset"]) == ("failed", 4)


def test_pages_link_to_newer_and_older_runs(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_SIZE", 1)
    text = html(ended.home, "/?offset=1&contains=d&state=")
    assert '<a href="/?offset=0&amp;contains=d&amp;state=">Newer</a>' in text
    assert '<a href="/?offset=2&amp;contains=d&amp;state=">Older</a>' in text
    assert "1 of 3 runs." in text
    assert 'data-part="/listing?offset=1&amp;contains=d&amp;state="' in text


def test_the_listing_has_the_results_of_the_same_runs(
    ended: Ended, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_SIZE", 2)
    respond(ended.home, "/listing")
    assert shown.template == "listing.html.j2"
    assert [(run["name"], run["seconds"]) for run in shown.values["runs"]] == [("bad", None), ("study-2", 60.0)]
    assert (shown.values["is_open"], shown.values["is_whole"]) == (False, True)
    assert [item["name"] for item in shown.values["experiments"]] == ["study"]
    respond(ended.home, "/listing?offset=1")
    assert [run["name"] for run in shown.values["runs"]] == ["study-2", "study-1"]
    assert shown.values["experiments"] == []  # only above the newest runs


EXPERIMENTS = ("completed", "running", "failed", "stopped", "pending", "completed")


@pytest.mark.parametrize(
    ("states", "run_state", "experiments", "is_open"),
    [
        (EXPERIMENTS, "finished", ["running", "stopped", "pending"], True),
        (("completed", "failed", "completed", "failed"), "finished", ["completed", "failed", "completed"], False),
        ((), "finished", [], False),
        ((), "running", [], True),
        (("completed",), "unknown", ["completed"], True),
    ],
)
def test_experiments_under_way_are_listed_else_the_newest_three(
    shown: Shown,
    monkeypatch: pytest.MonkeyPatch,
    states: tuple[str, ...],
    run_state: str,
    experiments: list[str],
    is_open: bool,
) -> None:
    rows = [{"id": "a", "state": "finished"}, {"id": "b", "state": run_state}]
    asked: list[int] = []

    def list_experiments(_: Any, *, limit: int) -> list[Any]:
        asked.append(limit)
        return [SimpleNamespace(status=lambda state=state: {"state": state}) for state in states]

    monkeypatch.setattr(pages, "list_runs", lambda *_, **__: [])
    monkeypatch.setattr(pages, "client_of", lambda _: SimpleNamespace(status=lambda _: {"runs": rows}))
    monkeypatch.setattr(pages, "list_experiments", list_experiments)
    respond(Path("/none"), "/listing")
    assert [item["state"] for item in shown.values["experiments"]] == experiments
    assert shown.values["is_open"] is is_open
    assert asked == [20]


def test_running_runs_have_their_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_CARDS", 3)
    handles = [
        handle("a", progress={"epoch": 1}, goal={"metric": "loss"}),
        handle("away", error=UnreachableError("gone")),
        handle("plain"),
        handle("too-many", progress={"epoch": 2}),
        handle("ended", "finished", progress={"epoch": 3}),
        handle("just-ended", "finished", progress={"epoch": 4}),
    ]
    rows: list[dict[str, Any]] = [{"id": name, "state": "finished"} for name in ("ended",)]
    rows += [{"id": name, "state": "running"} for name in ("a", "just-ended", "away", "plain", "too-many")]
    pages._add_progress(handles, rows)
    running = {"state": "running"}
    assert rows == [
        {"id": "ended", "state": "finished"},
        {"id": "a", **running, "progress": {"epoch": 1}, "goal": {"metric": "loss"}},
        {"id": "just-ended", **running},  # it ended between the two looks
        {"id": "away", **running},
        {"id": "plain", **running},
        {"id": "too-many", **running},
    ]
    pages._add_progress(handles[2:3], rows[4:5])
    assert rows[4] == {"id": "plain", **running, "progress": None, "goal": None}


# --- a run ----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_that_reached_its_goal(ended: Ended, shown: Shown) -> None:
    respond(ended.home, "/runs/study-2")
    assert (shown.template, shown.title) == ("run.html.j2", "study-2")
    values = shown.values
    assert (values["is_over"], values["experiment"], values["command"]) == (True, "study", "python a b.py")
    assert (values["failed_rank"], values["last_lines"], values["command_line"]) == (0, "", "")
    assert values["run"]["outcome"] == "goal_reached"
    assert dict(values["facts"])["Workers"] == "2 workers on this machine, gloo, cpu"
    assert values["resources"] == {
        0: {"cpu": 1.5, "memory": 1.0, "traffic": None},
        1: {"cpu": 1.5, "memory": 1.0, "traffic": None},
    }
    keys = {figure.key for section in values["report"].sections for figure in section.figures}
    assert keys <= set(values["svgs"])
    assert all("<svg " in svg for svg in values["svgs"].values())


def test_the_command_line_of_a_run_can_be_pasted(ended: Ended, shown: Shown) -> None:
    respond(ended.home, f"/runs/{ended.runs['study-1'].id}")
    assert shown.values["command_line"] == "mlbench run study 1 2 --set 'a b'"


def test_the_page_of_a_failed_run_has_the_last_lines_of_the_rank_that_failed(ended: Ended, shown: Shown) -> None:
    respond(ended.home, "/runs/bad")
    assert shown.values["failed_rank"] == 0
    assert shown.values["last_lines"].splitlines()[-1] == "Traceback (most recent call last):"
    assert shown.values["experiment"] is None


def test_a_run_of_another_cluster_has_no_page(ended: Ended) -> None:
    with pytest.raises(NotFoundError, match='The run "study-1" is not on far'):
        respond(ended.home, "/runs/study-1", cluster="far")


@pytest.mark.parametrize(
    ("errors", "log", "lines"),
    [
        (b"one\ntwo\n", b"", "one\ntwo"),
        (b"", b"three\n", "three"),
        (b"", b"", ""),
        (b"".join(b"%d\n" % number for number in range(30)), b"x\n", "\n".join(map(str, range(10, 30)))),
    ],
)
def test_the_last_lines_are_those_of_standard_error_if_there_are_any(
    tmp_path: Path, errors: bytes, log: bytes, lines: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / ".state").mkdir()
    (tmp_path / "logs" / "rank-3.log").write_bytes(log + errors)
    if errors:
        (tmp_path / ".state" / "stderr-3").write_text(f"{len(log)} {len(errors)}\n")
    assert pages._last_lines(cast(Any, SimpleNamespace(folder=tmp_path)), 3) == lines


# --- experiments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "is_open"),
    [
        ((), False),
        (("completed", "failed", "stopped"), False),
        (("completed", "running"), True),
        (("pending", "failed"), True),
    ],
)
def test_the_list_of_experiments_is_renewed_while_one_runs(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...], is_open: bool
) -> None:
    found = [SimpleNamespace(status=lambda state=state: {"state": state}) for state in states]
    monkeypatch.setattr(pages, "list_experiments", lambda _, limit: found if limit == 100 else None)
    respond(Path("/none"), "/experiment-list")
    assert shown.template == "experiment_list.html.j2"
    assert [item["state"] for item in shown.values["experiments"]] == list(states)
    assert shown.values["is_open"] is is_open


@pytest.mark.parametrize(
    ("path", "template"),
    [("/experiments/study", "experiment.html.j2"), ("/experiments/study/part", "experiment_part.html.j2")],
)
def test_an_experiment_with_its_runs_and_their_figures(ended: Ended, shown: Shown, path: str, template: str) -> None:
    respond(ended.home, path)
    assert (shown.template, shown.title) == (template, "Experiment study")
    assert [run["name"] for run in shown.values["runs"]] == ["study-1", "study-2"]
    assert shown.values["experiment"]["state"] == "completed"
    assert shown.values["report"].sections
    assert shown.values["svgs"]


def test_the_report_of_an_experiment_leaves_out_damaged_archives(
    ended: Ended, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_checked(run: Any) -> Any:
        opened.append(run.name)
        if run.name == "study-1":
            raise DamagedArchive("x", "result.json", "broken")
        return open_verified(run.folder)

    monkeypatch.setattr(pages, "open_checked", open_checked)
    respond(ended.home, "/experiments/study")
    assert opened == ["study-1", "study-2"]
    assert shown.values["report"] is not None
    monkeypatch.setattr(pages, "MAX_REPORT_RUNS", 1)
    respond(ended.home, "/experiments/study")
    assert opened[2:] == ["study-1"]
    assert (shown.values["report"], shown.values["svgs"]) == (None, {})


# --- new runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allows", "role", "may"),
    [(True, Role.ACT, True), (True, Role.READ, False), (False, Role.ACT, False)],
)
def test_who_may_start_runs(ended: Ended, shown: Shown, allows: bool, role: Role, may: bool) -> None:
    if not may:
        with pytest.raises(UsageError) as caught:
            respond(ended.home, "/new", role, allows_actions=allows)
        assert caught.value.message == READ_ONLY
        assert caught.value.hint == "mlbench serve --allow-actions, and a token that may act"
        return
    respond(ended.home, "/new", role, allows_actions=allows)
    assert (shown.template, shown.title) == ("new.html.j2", "New run")
    assert shown.values["methods"] == sorted(shown.values["methods"])
    assert {"bsp", "powersgd"} <= set(shown.values["methods"])
    assert shown.values["questions"]["clusters"]


@pytest.mark.parametrize(
    ("allows", "role", "words"),
    [
        (True, Role.ACT, '<a class="button primary" href="/new">New run</a>'),
        (True, Role.READ, '<span class="badge">read-only</span>'),
        (False, Role.ACT, '<span class="badge">read-only</span>'),
    ],
)
def test_pages_say_whether_one_may_act(ended: Ended, allows: bool, role: Role, words: str) -> None:
    text = html(ended.home, "/experiments", role, allows_actions=allows)
    assert words in text
    assert text.count("read-only") + text.count("New run") == 1
    assert '<a href="/experiments" aria-current="page">Experiments</a>' in text
    assert "<title>Experiments – mlbench</title>" in text


def test_a_page_names_the_cluster_that_it_shows(ended: Ended) -> None:
    assert '<span class="quiet">cluster far</span>' in html(ended.home, "/experiments", cluster="far")
    assert "cluster " not in html(ended.home, "/experiments")


def test_the_form_has_every_option_that_its_steps_do_not_ask_for() -> None:
    from mlbench_cli.runs.request import COMMON, OPTIONS

    panels = pages._other_options()
    assert next(iter(panels)) == COMMON
    fields = [field for panel in panels.values() for field in panel]
    assert sorted([field["name"] for field in fields] + list(pages.ASKED)) == sorted(item.name for item in OPTIONS)
    known = {field["name"]: field for field in fields}
    assert set(known["seed"]) == {"name", "flag", "kind", "help", "value"}
    assert (known["env"]["kind"], known["env"]["flag"]) == ("lines", "--env")
    assert known["seed"]["kind"] != "lines"


# --- comparisons ----------------------------------------------------------------------------------------------------


def test_an_empty_comparison_offers_all_names(ended: Ended, shown: Shown) -> None:
    respond(ended.home, "/compare")
    assert (shown.template, shown.title, shown.status) == ("compare.html.j2", "Compare", 200)
    assert shown.values == {
        "a": "",
        "b": "",
        "across": [],
        "names": ["study", "bad", "study-2", "study-1"],
        "found": None,
        "problem": None,
        "figures": (),
        "svgs": {},
    }


@pytest.mark.parametrize(
    ("query", "sides"),
    [
        ("a=study-1", ("study-1", "")),
        ("b=study-1", ("", "study-1")),
        ("run=study-1", ("study-1", "")),
        ("run=study-1&run=study-2&run=bad", ("study-1", "study-2")),
        ("run=study-1&b=study-2", ("study-1", "study-2")),
        (f"a={'x' * 101}", ("x" * 100, "")),
    ],
)
def test_which_runs_are_compared(
    ended: Ended, shown: Shown, monkeypatch: pytest.MonkeyPatch, query: str, sides: tuple[str, str]
) -> None:
    asked: list[Any] = []

    def compare_runs(_: Any, query: Any, across: list[str]) -> Any:
        asked.append((query, across))
        return {"verdict": "same"}

    monkeypatch.setattr(pages, "compare_runs", compare_runs)
    respond(ended.home, f"/compare?{query}&across=workers")
    assert (shown.values["a"], shown.values["b"]) == sides
    assert asked == ([({"a": sides[0], "b": sides[1]}, ["workers"])] if all(sides) else [])
    assert shown.values["found"] == ({"verdict": "same"} if all(sides) else None)


def test_the_curves_of_both_sides_are_drawn(ended: Ended, shown: Shown) -> None:
    respond(ended.home, "/compare?a=study-1&b=study-2&across=workers")
    assert shown.values["found"]["a"] == "study-1"
    assert shown.values["figures"]
    assert set(shown.values["svgs"]) == {figure.key for figure in shown.values["figures"]}


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("a=study-1&b=nobody", 404, 'There is no run "nobody".'),
        ("a=study-1&b=study-2&across=colour", 400, "colour"),
    ],
)
def test_a_comparison_that_cannot_be_made_keeps_the_names(
    ended: Ended, shown: Shown, query: str, status: int, words: str
) -> None:
    respond(ended.home, f"/compare?{query}")
    assert shown.status == status
    assert words in shown.values["problem"].message
    assert (shown.values["a"], shown.values["found"]) == ("study-1", None)
    assert shown.values["b"]


# --- clusters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "template"), [("/clusters", "clusters.html.j2"), ("/cluster-list", "cluster_list.html.j2")]
)
def test_clusters_with_runs_come_first(shown: Shown, monkeypatch: pytest.MonkeyPatch, path: str, template: str) -> None:
    running = [handle("r-2", cluster="b"), handle("r-1", cluster="b")]
    known = [handle("a-new", "finished", "a"), *running, handle("a-old", "finished", "a")]

    def list_runs(_: Any, *, limit: int, states: tuple[str, ...] = ()) -> list[Any]:
        assert (limit, states) in ((50, ()), (50, ("running",)))
        return running if states else known

    def describe(cluster: Cluster, own: list[Any], number: int) -> Any:
        return {"name": cluster.name, "number": number, "runs": [run.name for run in own], "figures": []}

    monkeypatch.setattr(pages, "list_runs", list_runs)
    monkeypatch.setattr(pages, "list_clusters", lambda _: [Cluster(name, "gke") for name in "abc"])
    monkeypatch.setattr(pages, "describe_cluster", describe)
    respond(Path("/none"), path)
    assert (shown.template, shown.title) == (template, "Clusters")
    assert shown.values == {
        "clusters": [
            {"name": "b", "number": 1, "runs": ["r-2", "r-1"], "figures": [], "last": "r-2"},
            {"name": "a", "number": 0, "runs": [], "figures": [], "last": "a-new"},
            {"name": "c", "number": 2, "runs": [], "figures": [], "last": None},
        ],
        "svgs": {},
        "is_open": True,
    }


def test_clusters_without_running_runs_are_not_renewed(ended: Ended) -> None:
    text = html(ended.home, "/cluster-list")
    assert 'data-open="no"' in text
    assert 'attached · 3 nodes · no run in progress, last: <a href="/runs/bad">bad</a>' in text
    assert 'no run in progress, last: <a href="/runs/study-2">study-2</a>' in text


# --- reports --------------------------------------------------------------------------------------------------------


def test_a_report_without_runs_leads_to_the_overview(ended: Ended) -> None:
    answer = respond(ended.home, "/report")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_a_report_has_its_own_policy_which_is_stricter(ended: Ended) -> None:
    answer = respond(ended.home, "/report?run=study-1&run=bad")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert policy.endswith("; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    assert policy.count("base-uri") == 1
    assert "&" not in policy
    text = bytes(answer.body).decode()
    assert "study-1" in text
    assert "bad" in text


def test_a_report_of_an_experiment_is_one_of_its_runs(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def collect(archives: Any, **_: Any) -> Any:
        seen.extend(archive.run["name"] for archive in archives)
        raise MlbenchError("enough")

    monkeypatch.setattr("mlbench_cli.results.report.collect.collect", collect)
    with pytest.raises(MlbenchError, match="enough"):
        respond(ended.home, "/report?run=bad&run=study")
    assert seen == ["bad", "study-1", "study-2"]
    with pytest.raises(NotFoundError, match='There is no experiment "nobody"'):
        respond(ended.home, "/report?run=nobody")


def test_a_report_has_a_hundred_runs_at_most(ended: Ended) -> None:
    with pytest.raises(UsageError, match="A report here has at most 100 runs"):
        respond(ended.home, f"/report?{'&'.join(['run=x'] * 101)}")
    with pytest.raises(NotFoundError):  # of the first of them
        respond(ended.home, f"/report?{'&'.join(['run=x'] * 100)}")


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("figures.css", "text/css; charset=utf-8"),
        ("page.css", "text/css; charset=utf-8"),
        ("dashboard.css", "text/css; charset=utf-8"),
        ("dashboard.js", "text/javascript; charset=utf-8"),
    ],
)
def test_a_file_may_be_cached_under_the_address_of_its_content(name: str, kind: str) -> None:
    address = pages.asset_path(name)
    answer = respond(Path("/none"), address)
    assert answer.headers["content-type"] == kind
    assert answer.headers["cache-control"] == "max-age=31536000, immutable"
    assert address == f"/static/{hashlib.sha256(answer.body).hexdigest()[:12]}/{name}"
    other = respond(Path("/none"), f"/static/0123/{name}")
    assert (other.status_code, other.body) == (200, answer.body)
    assert "cache-control" not in other.headers


def test_other_files_are_not_served() -> None:
    assert respond(Path("/none"), "/static/0123/config.py").status_code == 404
    icon = respond(Path("/none"), "/favicon.ico")
    assert (icon.status_code, icon.body) == (204, b"")


def test_a_problem_is_a_page_with_its_hint(ended: Ended) -> None:
    from starlette.requests import Request

    request = Request({"type": "http", "method": "GET", "path": "/x", "query_string": b"", "headers": []})
    answer = pages.render_problem(request, 404, "There is <nothing>.", "mlbench status")
    text = bytes(answer.body).decode()
    assert answer.status_code == 404
    assert "There is &lt;nothing&gt;." in text
    assert "mlbench status" in text
    assert ("read-only" in text, "New run" in text) == (False, False)


def test_what_the_first_page_needs_is_loaded_first(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    environment = SimpleNamespace(get_template=loaded.append)
    monkeypatch.setattr(pages, "_environment", lambda: environment)
    pages.warm_up(ServerConfig(ended.home, 8080, token="t"))
    assert loaded[:3] == ["overview.html.j2", "listing.html.j2", "run.html.j2"]
    assert sorted(loaded) == sorted(path.name for path in pages.PAGES.glob("*.html.j2"))
