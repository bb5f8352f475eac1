"""The client and the command line of mlbench-core 3.0.0, unchanged, against our server.

The package is installed without its dependencies, most of which are long outdated; its command line gets stand-ins for
the clouds' libraries, which it imports and does not use here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import JsonObject
from mlbench_cli.server.original import parse_since, select_samples
from tests.contract.server.dashboards import Dashboard
from tests.needs import missing, needs

pytestmark = pytest.mark.nightly  # the packages come from an index
PACKAGES = ("mlbench-core==3.0.0", "click<9", "tabulate<1")
RUNNER = r"""
import importlib.abc, importlib.machinery, json, sys, types
from unittest.mock import MagicMock
target, mode = sys.argv[1], sys.argv[2]
sys.path.insert(0, target)
def module(name, **contents):
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    sys.modules[name] = made
    return made
package = module("mlbench_core", __version__="3.0.0")
package.__path__ = [target + "/mlbench_core"]
for name in ("aws_utils", "gcloud_utils", "kind_utils", "utils"):
    sys.modules[f"mlbench_core.cli.{name}"] = MagicMock()
for name in ("boto3", "botocore", "botocore.exceptions"):
    sys.modules[name] = MagicMock()
if mode == "cli":
    import mlbench_core.cli.cli as cli
    cli.setup_client_from_config = lambda: True
    cli.cli_group(sys.argv[3:], prog_name="mlbench")
else:
    from mlbench_core.api import ApiClient
    with ApiClient(in_cluster=False, url=sys.argv[3]) as client:
        answers = []
        for name, arguments, named in json.loads(sys.argv[4]):
            answer = getattr(client, name)(*arguments, **named).result()
            kind = answer.headers.get("content-type", "")
            body = answer.json() if "json" in kind else len(answer.content)
            answers.append([answer.status_code, body, answer.url, len(answer.history)])
        print(json.dumps(answers))
"""


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package. Skips the tests if no index can be reached."""
    target = tmp_path_factory.mktemp("core")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        missing(f"mlbench-core 3.0.0 cannot be installed: {done.stderr.strip()[-200:]}")
    return target


def call(core: Path, url: str, *calls: tuple[str, list[Any], JsonObject]) -> list[list[Any]]:
    """Status, body, address and number of redirects of each call of the client."""
    words = [sys.executable, "-c", RUNNER, str(core), "api", url, json.dumps(calls)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def command_line(core: Path, folder: Path, *words: str, answers: str = "") -> str:
    environment = {**os.environ, "HOME": str(folder), "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", RUNNER, str(core), "cli", *words]
    done = subprocess.run(
        command, input=answers, capture_output=True, text=True, timeout=180, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_reading_method_works(core: Path, dashboard: Dashboard) -> None:
    ((status, runs, _, redirects),) = call(core, dashboard.client_url, ("get_runs", [], {}))
    assert (status, redirects) == (200, 0)
    assert [run["name"] for run in runs] == ["alpha-1", "alpha-2", "alpha-4"]
    assert {run["state"] for run in runs} == {"finished"}
    assert {"id", "created_at", "finished_at", "job_id", "job_metadata", "num_workers"} <= set(runs[0])
    number = runs[1]["id"]
    one, pods, metrics, every, pod, zipped, nobody = call(
        core,
        dashboard.client_url,
        ("get_run", [number], {}),
        ("get_worker_pods", [], {}),
        ("get_run_metrics", [number], {"metric_filter": "val_global_Prec@1 @ 0", "last_n": 2}),
        ("get_all_metrics", [], {}),
        ("get_pod_metrics", ["alpha-2-0"], {"summarize": 2}),
        ("download_run_metrics", [number], {}),
        ("get_run", [1], {}),
    )
    assert one[1]["job_metadata"]["stdout"][0] == "loading the data\n"
    assert set(pods[1][0]) == {"name", "labels", "phase", "ip"}
    values = metrics[1]["val_global_Prec@1 @ 0"]
    assert [value["value"] for value in values] == ["60.0", "80.5"]
    assert set(values[0]) == {"date", "value", "cumulative"}
    assert set(every[1]["run_metrics"]) == {"alpha-1", "alpha-2", "alpha-4"}
    assert set(every[1]["run_metrics"]["alpha-2"]["global_cum_agg @ 0"][0]) == {
        *("name", "value", "date", "metadata", "cumulative")
    }
    assert len(pod[1]["cpu"]) <= 2
    assert zipped[:2] == [200, zipped[1]]
    assert zipped[1] > 1000
    assert nobody[0] == 404
    assert nobody[1]["message"]


def test_a_password_in_the_address_works_too(core: Path, dashboard: Dashboard) -> None:
    url = f"x:{dashboard.token}@127.0.0.1:{dashboard.port}"
    ((status, *_),) = call(core, url, ("get_runs", [], {}))
    assert status == 200


def test_since_works_in_the_clients_own_spelling(core: Path, dashboard: Dashboard) -> None:
    (runs,) = call(core, dashboard.client_url, ("get_runs", [], {}))
    number, name = runs[1][0]["id"], "val_global_Prec@1 @ 0"
    early, late, bad = call(
        core,
        dashboard.client_url,
        ("get_run_metrics", [number], {"since": "2025-10-09 00:00:00", "metric_filter": name}),
        ("get_run_metrics", [number], {"since": "2027-01-01 00:00:00", "metric_filter": name}),
        ("get_run_metrics", [number], {"since": "soon"}),
    )
    assert len(early[1][name]) == 3
    assert late[:2] == [200, {}]
    assert bad[0] == 400


def test_runs_are_started_measured_and_deleted(core: Path, acting: Dashboard, program: str) -> None:
    create = {"custom_image_name": "any:1", "custom_image_command": program, "custom_backend": "own"}
    ((status, document, _, _),) = call(
        core, acting.client_url, ("create_run", ["mine-1", 1], {"backend": None, **create})
    )
    assert status in (201, 400)
    if status == 400:  # an image needs a cluster; without one the message says so
        assert document["message"]
    acting.post("/api/v1/runs", {"name": "own", "workers": [1], "command": program})
    (runs,) = call(core, acting.client_url, ("get_runs", [], {}))
    number = next(run["id"] for run in runs[1] if run["name"] == "own-1")
    posted, read, removed, again = call(
        core,
        acting.client_url,
        ("post_metric", [number, "mine", 1.5], {"metadata": {"a": 1, "b": 2}}),
        ("get_run_metrics", [number], {"metric_filter": "mine"}),
        ("delete_run", [number], {}),
        ("get_run", [number], {}),
    )
    assert (posted[0], posted[1]["value"], posted[1]["metadata"]) == (201, "1.5", "a, b")
    assert [sample["value"] for sample in read[1]["mine"]] == ["1.5"]
    assert removed[0] == 204
    assert again[0] == 404


def test_the_originals_status_and_download_work(core: Path, dashboard: Dashboard, tmp_path: Path) -> None:
    text = command_line(core, tmp_path, "status", "-u", dashboard.client_url)
    assert "alpha-2" in text
    text = command_line(core, tmp_path, "status", "alpha-2", "-u", dashboard.client_url)
    assert "Current Global Precision: 80.50" in text
    assert "Current Global Loss: 0.50" in text
    command_line(core, tmp_path, "download", "alpha-2", "-u", dashboard.client_url)
    assert any(path.suffix == ".zip" or path.stat().st_size > 1000 for path in tmp_path.rglob("*") if path.is_file())


def test_the_originals_charts_draw_our_runs(core: Path, dashboard: Dashboard, tmp_path: Path) -> None:
    """With a run of one worker, which has aggregated nothing: a missing figure would be a KeyError there."""
    needs("matplotlib")
    text = command_line(core, tmp_path, "charts", "out", "-u", dashboard.client_url, answers="0 1 2\n")
    assert "Summary created in" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("total_time.png", "speedup.png", "time_for_all_phases.png")
    }


@pytest.mark.parametrize("end", ["", "/"])
@pytest.mark.parametrize("path", ["/api/runs", "/api/pods", "/api/metrics"])
def test_both_forms_of_a_path_are_answered_without_a_redirect(dashboard: Dashboard, path: str, end: str) -> None:
    assert dashboard.ask(path + end).status == 200


@pytest.mark.parametrize("query", ["summarize=-1", "last_n=abc", "summarize=1.5", "since=x", "metric_type=node"])
def test_a_bad_query_is_refused(dashboard: Dashboard, query: str) -> None:
    number = dashboard.ask("/api/runs").document[0]["id"]
    kind = "" if "metric_type" in query else "metric_type=run&"
    answer = dashboard.ask(f"/api/metrics/{number}?{kind}{query}")
    assert answer.status == 400
    assert answer.document["message"]


def test_samples_are_filtered_then_summarized_then_cut() -> None:
    dates = [f"2026-01-01T00:00:{second:02d}.000Z" for second in range(10)]
    series = {"loss @ 0": [{"date": date, "value": str(n), "cumulative": False} for n, date in enumerate(dates)]}
    found = select_samples(series, since=None, summarize=4, name="loss @ 0", last=2)  # type: ignore[arg-type]
    assert [(sample["date"], sample["value"]) for sample in found["loss @ 0"]] == [(dates[3], "4.0"), (dates[6], "7.0")]
    late = select_samples(series, since="2026-01-01 00:00:08", summarize=0, name=None, last=0)  # type: ignore[arg-type]
    assert [sample["value"] for sample in late["loss @ 0"]] == ["8", "9"]
    assert select_samples(series, since=None, summarize=0, name="x", last=0) == {}  # type: ignore[arg-type]


def test_a_time_is_read_in_both_spellings_and_without_a_zone_is_utc() -> None:
    assert parse_since("2026-11-22 00:00:00") == parse_since("2026-11-22T00:00:00.000000Z") == 1795305600.0
