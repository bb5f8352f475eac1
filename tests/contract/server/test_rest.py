"""The REST API: the same documents as the commands, and clear errors."""

import json
import re
import shutil
import zipfile
from html import escape
from io import BytesIO
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.run import Experiment, JsonObject, Member
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.server.words import arrange
from mlbench_cli.storage.store import Store
from tests.contract.local_runs import until
from tests.contract.server.dashboards import Dashboard, serve
from tests.unit.results import runs


def read_printed(capsys: pytest.CaptureFixture[str], *words: str) -> JsonObject:
    assert run([*words, "-o", "json"]) == 0
    document: JsonObject = json.loads(capsys.readouterr().out)
    document.pop("schema_version", None)
    return document


def test_documents_are_those_that_the_commands_print(
    dashboard: Dashboard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(dashboard.home))
    listed = dashboard.ask("/api/v1/runs").document
    assert read_printed(capsys, "status") == {"runs": listed["runs"][::-1], "repeats": listed["repeats"]}
    assert dashboard.ask("/api/v1/runs/alpha-2").document == read_printed(capsys, "status", "alpha-2")
    compared = dashboard.ask("/api/v1/compare?a=alpha-1&b=alpha-2&across=workers").document
    words = ("compare", "alpha-1", "alpha-2", "--across", "workers")
    wanted = {**read_printed(capsys, *words), "schema_version": 1}
    assert compared == wanted


def test_runs_are_found_and_paged(dashboard: Dashboard) -> None:
    names = [each["name"] for each in dashboard.ask("/api/v1/runs").document["runs"]]
    assert names == ["alpha-4", "alpha-2", "alpha-1"]
    page = dashboard.ask("/api/v1/runs?limit=1&offset=1").document
    assert ([each["name"] for each in page["runs"]], page["total"]) == (["alpha-2"], 3)
    assert dashboard.ask("/api/v1/runs?state=failed").document["runs"] == []
    assert len(dashboard.ask("/api/v1/runs?contains=-4").document["runs"]) == 1


def test_metrics_can_be_chosen_and_summarized(dashboard: Dashboard) -> None:
    points = dashboard.ask("/api/v1/runs/alpha-2/metrics?name=val_Prec%401&rank=0").document["points"]
    assert [point["value"] for point in points] == [40.0, 60.0, 80.5]
    last = dashboard.ask("/api/v1/runs/alpha-2/metrics?name=val_Prec%401&last=1&summarize=2").document["points"]
    assert [(point["value"], point["time"]) for point in last] == [(50.0, points[0]["time"])]
    losses = dashboard.ask("/api/v1/runs/alpha-2/metrics?name=train_loss&rank=1").document["points"]
    assert {(point["name"], point["rank"]) for point in losses} == {("train_loss", 1)}
    samples = dashboard.ask("/api/v1/runs/alpha-2/resources?last=2").document["samples"]
    assert [(sample["rank"], sample["cpu_seconds"]) for sample in samples] == [(0, 1.5), (1, 1.5)]


def test_an_archive_is_downloaded_whole(dashboard: Dashboard, tmp_path: Path) -> None:
    answer = dashboard.ask("/api/v1/runs/alpha-1/archive")
    assert 'filename="alpha-1.zip"' in answer.headers["content-disposition"]
    path = tmp_path / "alpha-1.zip"
    path.write_bytes(answer.body)
    assert not verify(path).problems
    assert "result.json" in zipfile.ZipFile(BytesIO(answer.body)).namelist()


def test_a_log_is_read_page_by_page(dashboard: Dashboard) -> None:
    first = dashboard.ask("/api/v1/runs/alpha-1/logs?rank=0&limit=1024").document
    assert first["lines"][0] == "loading the data"
    lines, page = list(first["lines"]), first
    while page["end"] < page["size"]:
        page = dashboard.ask(f"/api/v1/runs/alpha-1/logs?offset={page['end']}&limit=1024").document
        lines += page["lines"]
    assert lines == ["loading the data", "epoch 0 of 3", "epoch 1 of 3", "epoch 2 of 3"]
    assert dashboard.ask("/api/v1/runs/alpha-1/logs?offset=-1").document["end"] == first["size"]
    raw = dashboard.ask("/api/v1/runs/alpha-1/logs?raw=true").document["lines"]
    assert any(line.startswith("@mlbench ") for line in raw)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/runs/nobody", 404),
        ("/api/v1/runs/alpha-1/logs?rank=7", 404),
        ("/api/v1/runs/alpha-1/logs?rank=-1", 400),
        ("/api/v1/runs/alpha-1/metrics?since=yesterday", 400),
        ("/api/v1/runs/alpha-1/metrics?last=many", 400),
        ("/api/v1/runs?limit=100000", 400),
        ("/api/v1/runs?state=finishd", 400),
        ("/api/v1/compare?a=alpha-1", 400),
        ("/api/v1/compare?a=alpha-1&b=alpha-2&across=nothing", 400),
        ("/api/v1/experiments/nobody", 404),
        ("/api/v1/nothing", 404),
    ],
)
def test_what_is_wrong_with_a_request_is_said(dashboard: Dashboard, path: str, status: int) -> None:
    answer = dashboard.ask(path)
    assert answer.status == status
    assert answer.document["message"]


def test_a_run_is_started_stopped_and_deleted(acting: Dashboard, program: str) -> None:
    started = acting.post("/api/v1/runs", {"name": "mine", "workers": [1], "command": program})
    assert (started.status, started.document) == (201, {"experiment": "mine", "runs": ["mine-1"]})
    assert acting.post("/api/v1/runs/mine-1/cancel", {}).document["outcome"] in ("canceled", "completed")
    assert acting.ask("/api/v1/runs/mine-1", "DELETE").document == {"name": "mine-1", "deleted": True}
    assert acting.ask("/api/v1/runs").document["runs"] == []


@pytest.mark.parametrize(
    ("document", "status"),
    [
        ({}, 400),
        ([], 400),
        ({"name": "x"}, 400),
        ({"name": "x", "workers": [1], "task": "nothing"}, 404),
        ({"name": "X y", "workers": [1], "command": "true"}, 400),
        ({"name": "x", "workers": [1], "command": "true", "tsak": 1}, 400),
        ({"name": "x", "workers": ["a"], "command": "true"}, 400),
        ({"name": "x", "workers": [0], "command": "true"}, 400),
    ],
)
def test_a_bad_request_starts_nothing(idle: Dashboard, document: object, status: int) -> None:
    answer = idle.post("/api/v1/runs", document)
    assert answer.status == status
    assert answer.document["message"]
    assert idle.ask("/api/v1/runs").document["runs"] == []


def test_no_run_is_larger_than_the_limits_of_the_dashboard(tmp_path: Path) -> None:
    wanted = {"name": "x", "command": "true"}
    with serve(tmp_path, "--allow-actions", "--max-workers", "1") as limited:
        for more in ({"workers": [5]}, {"workers": [1, 2]}):
            answer = limited.post("/api/v1/runs", {**wanted, **more})
            assert answer.status == 400, answer.document
        assert limited.ask("/api/v1/runs").document["runs"] == []


def test_a_form_gives_any_option_as_on_a_command_line(idle: Dashboard) -> None:
    wanted = {"name": "x", "workers": [2], "task": "digits_resnet", "preset": "tiny"}
    options = "--set batch_size=16 --set=depth=14 --seed 7 -l --set run.pin=no --matrix 'set.shift=0,1' --seed=8"
    planned = idle.post("/api/v1/runs?check=true", {**wanted, "options": options}).document
    assert len(planned["runs"]) == 2
    command = planned["command"]
    assert command.endswith(
        "--set batch_size=16 --set depth=14 --light --seed 8 --matrix set.shift=0,1 --set run.pin=no"
    ), command
    for wrong, reason in (
        ("--seed x", "--seed"),
        ("--sede 1", 'Did you mean "--seed"?'),
        ("--seed", "needs a value"),
        ("--set run.pin=maybe", "yes or no"),
        ("--create kind", "only on the command line"),
        ("'", "cannot be read"),
        ("more", "Unknown option"),
        ({"seed": 1}, "options"),
    ):
        answer = idle.post("/api/v1/runs?check=true", {**wanted, "options": wrong})
        assert (answer.status, reason in answer.document["message"]) == (400, True), (wrong, answer.document)


def test_a_broken_archive_is_a_clear_answer(acting: Dashboard, program: str) -> None:
    acting.post("/api/v1/runs", {"name": "mine", "workers": [1], "command": "true"})
    until(lambda: acting.ask("/api/v1/runs/mine-1").document.get("state") == "finished")
    (folder,) = (acting.home / "runs").iterdir()
    (folder / "result.json").write_text("{broken")
    for path in ("/runs/mine-1", "/api/v1/runs/mine-1", "/report?run=mine-1", "/"):
        answer = acting.ask(path, headers={"Accept": "text/html"})
        assert answer.status in (200, 400, 500), path
        assert b"Traceback" not in answer.body
    assert b"result.json" in acting.ask("/report?run=mine-1").body


def test_an_archive_that_changes_while_it_is_shown_is_checked_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    diverged = [runs.event("metric", at=9.0, name="odd", value="nan")]
    folder = runs.record_sealed(store, "mine-1", 1, 60.0, lines=diverged).folder
    store.close()
    log = folder / "logs/rank-0.log"
    with serve(tmp_path) as dashboard:
        assert dashboard.ask("/runs/mine-1").status == 200
        (point,) = dashboard.ask("/api/v1/runs/mine-1/metrics?name=odd").document["points"]
        assert point["value"] == "nan"
        log.write_text(log.read_text().replace("loading the data", "leading the data"))  # of the same size
        assert b"logs/rank-0.log" in dashboard.ask("/runs/mine-1").body


def test_more_than_two_selected_runs_are_compared_in_a_report(dashboard: Dashboard) -> None:
    runs = ("alpha-1", "alpha-2", "beta-1")
    answer = dashboard.ask(f"/compare?{'&'.join(f'run={name}' for name in (*runs, *runs))}")
    assert (answer.status, answer.headers["location"]) == (303, "/report?run=alpha-1&run=alpha-2&run=beta-1")
    two = dashboard.ask("/compare?run=alpha-1&run=alpha-2&run=alpha-1")
    assert (two.status, b"What differs" in two.body) == (200, True)


def test_the_overview_comes_at_once_and_its_results_after_it(dashboard: Dashboard) -> None:
    """The page is answered from the store alone: it must not wait for folders and clusters."""
    page = dashboard.ask("/?contains=alpha&state=finished", headers={"Accept": "text/html"}).body.decode()
    assert 'data-part="/listing?offset=0&amp;contains=alpha&amp;state=finished"' in page
    assert "alpha-4" in page
    # Of the rows alone: digests in the addresses of styles and scripts have any digits.
    rows = page.partition("<tbody>")[2].partition("</tbody>")[0]
    assert rows.count("<tr>") == 3
    assert "60" not in re.sub(r"<time.*?</time>", "", rows)
    part = dashboard.ask("/listing?contains=alpha-2", headers={"Accept": "text/html"}).body.decode()
    assert "top-1 accuracy 80.5\u00a0%, goal 80" in part
    assert "<strong>60.0\u00a0s</strong>" in part
    assert 'data-open="no"' in part
    assert "alpha-4" not in part


def names_in(part: str) -> list[str]:
    return re.findall(r'name="run" value="([^"]+)"', part)


def test_a_heading_sorts_the_list_and_sorts_it_the_other_way_the_second_time(dashboard: Dashboard) -> None:
    def ask(sort: str) -> str:
        return dashboard.ask(f"/listing?contains=alpha{sort}", headers={"Accept": "text/html"}).body.decode()

    assert '<a href="/?sort=time&amp;contains=alpha&amp;state=">time</a>' in ask("")
    assert names_in(ask("&sort=time")) == ["alpha-4", "alpha-2", "alpha-1"]
    assert 'aria-sort="ascending"><a href="/?sort=-time' in ask("&sort=time")
    assert names_in(ask("&sort=-time")) == names_in(ask("&sort=workers")) == ["alpha-1", "alpha-2", "alpha-4"]
    assert dashboard.ask("/listing?sort=color").status == 400
    rows = [{"name": name, "seconds": seconds} for name, seconds in (("a", 1.0), ("b", None), ("c", 2.0))]
    ((_, found),) = (group.values() for group in arrange(rows, "-time"))
    assert [row["name"] for row in found] == ["c", "a", "b"]  # without a time at the end, both ways


def test_the_page_of_a_failed_run_shows_the_last_lines_of_the_rank_that_failed(acting: Dashboard) -> None:
    script = "[ $RANK = 0 ] && exec sleep 60; echo lost my way; exit 3"
    acting.post("/api/v1/runs", {"name": "bad", "workers": [2], "command": ["sh", "-c", script]})
    until(lambda: acting.ask("/api/v1/runs/bad-2").document.get("state") == "finished")
    page = acting.ask("/runs/bad-2", headers={"Accept": "text/html"}).body.decode()
    assert "\nlost my way" in page.replace(">", "\n")


def test_the_overview_shows_runs_whose_folders_are_gone(acting: Dashboard) -> None:
    acting.post("/api/v1/runs", {"name": "mine", "workers": [1], "command": "true"})
    until(lambda: acting.ask("/api/v1/runs/mine-1").document.get("state") == "finished")
    (folder,) = (acting.home / "runs").iterdir()
    shutil.rmtree(folder)
    for path in ("/", "/listing", "/api/v1/runs"):
        answer = acting.ask(path)
        assert (answer.status, b"mine-1" in answer.body) == (200, True), path


def test_experiments_of_several_sizes_are_compared_size_by_size_on_the_page_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for side, factor in (("a", 1.0), ("b", 1.3)):
        sizes = [(workers, number) for workers in (1, 2) for number in range(3)]
        made = [
            runs.record_sealed(
                store, f"{side}-{workers}-r{number + 1}", workers, factor * (10 + number / 10), seed=number
            )
            for workers, number in sizes
        ]
        members = tuple(Member(place, run.id, run.spec.content_hash) for place, run in enumerate(made))
        store.record_experiment(Experiment(side, side, "2025-10-09T08:00:00.000Z", {"name": side}, members=members), [])
    store.close()
    with serve(tmp_path) as dashboard:
        page, found = dashboard.ask("/compare?a=a&b=b"), dashboard.ask("/api/v1/compare?a=a&b=b").document
    assert page.status == 200
    assert [one["cell"] for one in found["comparisons"]] == [{"workers": "1"}, {"workers": "2"}]
    for one in found["comparisons"]:
        assert escape(one["verdict"]) in page.body.decode()
