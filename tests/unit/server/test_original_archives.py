"""What MLBench 3's client gets of runs whose archives are complete: runs, pods, metrics, and the zip."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.errors import NotFoundError
from mlbench_cli.server import original
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.original import number_of
from tests.unit.server.asking import ask, read_json
from tests.unit.server.conftest import Ended


def respond(ended: Ended, path: str, **config: Any) -> Any:
    return ask(original.make_routes(ServerConfig(ended.home, 8080, token="t", **config)), path)


def get(ended: Ended, path: str, **config: Any) -> Any:
    return read_json(respond(ended, path, **config))


def number(ended: Ended, name: str) -> int:
    return number_of(ended.runs[name].id)


def test_runs_are_listed_the_oldest_first(ended: Ended) -> None:
    rows = get(ended, "/api/runs")
    assert [(row["name"], row["state"], row["num_workers"]) for row in rows] == [
        *(("study-1", "finished", 1), ("study-2", "finished", 2), ("bad", "failed", 2))
    ]
    assert [row["name"] for row in get(ended, "/api/runs/", cluster="far")] == ["bad"]


def test_a_run_has_its_log_command_and_pods(ended: Ended) -> None:
    run = ended.runs["study-2"]
    found = get(ended, f"/api/runs/{number(ended, 'study-2')}")
    metadata = found.pop("job_metadata")
    assert found == {
        "id": int(run.id, 16),
        "name": "study-2",
        "created_at": run.created,
        "finished_at": "2025-10-09T08:54:23.000Z",  # 63 s after the start of its ranks
        "state": "finished",
        "job_id": "",
        "num_workers": 2,
    }
    lines = metadata.pop("stdout")
    assert sorted(set(lines)) == ["epoch 0 of 3\n", "epoch 1 of 3\n", "epoch 2 of 3\n", "loading the data\n"]
    assert len(lines) == 8
    assert metadata == {
        "stderr": [],
        "pods": ["study-2-0", "study-2-1"],
        "command": "python a b.py",
        "master_name": "study-2-0",
        "workhorse_pid": None,
    }


def test_pods_are_those_of_the_newest_run_where_none_runs(ended: Ended) -> None:
    labels = "{'app': 'mlbench', 'component': 'worker', 'run': 'bad'}"
    assert get(ended, "/api/pods") == [
        {"name": "bad-0", "labels": labels, "phase": "Failed", "ip": "this-host"},
        {"name": "bad-1", "labels": labels, "phase": "Succeeded", "ip": "this-host"},
    ]
    local = get(ended, "/api/pods", cluster="local")
    assert [(pod["name"], pod["ip"]) for pod in local] == [("study-2-0", "127.0.0.1"), ("study-2-1", "127.0.0.1")]


def values(series: list[dict[str, Any]]) -> list[float]:
    return [float(sample["value"]) for sample in series]


def test_metrics_of_a_run_have_the_names_and_sums_of_mlbench_3(ended: Ended) -> None:
    """Of 60 s a quarter was communication, almost; see SHARES of the runs' logs."""
    found = get(ended, f"/api/metrics/{number(ended, 'study-2')}?metric_type=run")
    assert found["val_Prec@1 @ 0"] == [
        {"date": "2025-10-09T08:53:40.000Z", "value": "40.0", "cumulative": False},
        {"date": "2025-10-09T08:54:00.000Z", "value": "60.0", "cumulative": False},
        {"date": "2025-10-09T08:54:20.000Z", "value": "80.5", "cumulative": False},
    ]
    assert found["val_global_Prec@1 @ 0"] == found["val_Prec@1 @ 0"]
    assert values(found["train_loss @ 1"]) == [2.0, 1.0, pytest.approx(2 / 3)]
    sums = {name: values(found[f"global_cum_{name} @ 0"]) for name in ("agg", "backprop", "fwd_pass", "opt_step")}
    assert sums == {
        "agg": [pytest.approx(0.24 * 60)],
        "backprop": [pytest.approx(0.32 * 60)],
        "fwd_pass": [pytest.approx(0.16 * 60)],
        "opt_step": [pytest.approx(0.05 * 60)],
    }
    assert values(found["TotalCumulativeTrainTime @ 0"]) == [pytest.approx(0.86 * 60)]
    assert not any(name.startswith("result_") for name in found)


def test_a_run_of_one_worker_has_no_time_of_aggregation_but_a_value(ended: Ended) -> None:
    found = get(ended, f"/api/metrics/{number(ended, 'study-1')}?metric_type=run")
    assert {"global_cum_agg @ 0", "global_cum_fwd_pass @ 0"} <= set(found)
    assert "train_loss @ 1" not in found


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("metric_filter=val_Prec%401+%40+0", [40.0, 60.0, 80.5]),
        ("metric_filter=val_Prec%401+%40+0&last_n=1", [80.5]),
        ("metric_filter=val_Prec%401+%40+0&since=2025-10-09+08:54:00", [60.0, 80.5]),
        ("metric_filter=val_Prec%401+%40+0&since=2025-10-09T08:54:00.001Z", [80.5]),
        ("metric_filter=val_Prec%401+%40+0&summarize=2", [50.0]),
        ("metric_filter=nothing", []),
    ],
)
def test_metrics_are_chosen_as_mlbench_3_did(ended: Ended, query: str, found: list[float]) -> None:
    series = get(ended, f"/api/metrics/{number(ended, 'study-2')}?metric_type=run&{query}")
    assert values(series.get("val_Prec@1 @ 0", [])) == found
    assert len(series) == (1 if found else 0)


def test_a_pod_has_the_use_of_its_machine(ended: Ended) -> None:
    """A MiB, and half a core between two samples a second apart."""
    found = get(ended, "/api/metrics/study-2-1")
    assert values(found["memory"]) == [1.0, 1.0, 1.0]
    assert found["cpu"] == [
        {"date": f"2025-10-09T08:53:{second}.000Z", "value": "0.5", "cumulative": False} for second in (22, 23)
    ]
    assert get(ended, "/api/metrics/study-1-0") == {}  # it had no samples
    for unknown in ("study-2-2", "study-2-", "nobody-0"):
        with pytest.raises(NotFoundError):
            respond(ended, f"/api/metrics/{unknown}")


def test_all_metrics_are_by_run_and_by_pod(ended: Ended) -> None:
    found = get(ended, "/api/metrics")
    assert list(found) == ["pod_metrics", "run_metrics"]
    assert sorted(found["run_metrics"]) == ["bad", "study-1", "study-2"]
    assert sorted(found["pod_metrics"]) == ["study-2-0", "study-2-1"]
    assert found["run_metrics"]["study-2"]["val_Prec@1 @ 0"][0] == {
        "name": "val_Prec@1 @ 0",
        "date": "2025-10-09T08:53:40.000Z",
        "value": "40.0",
        "cumulative": False,
        "metadata": "{rank: 0}",
    }
    assert found["pod_metrics"]["study-2-0"]["memory"][0] == {
        "name": "memory",
        "date": "2025-10-09T08:53:21.000Z",
        "value": "1.0",
        "cumulative": False,
        "metadata": "",
    }


def test_all_metrics_are_those_of_the_newest_runs(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "MAX_RUNS", 2)
    assert sorted(get(ended, "/api/metrics")["run_metrics"]) == ["bad", "study-2"]


def test_results_are_the_zip_of_mlbench_3(ended: Ended) -> None:
    answer = respond(ended, f"/api/metrics/{number(ended, 'study-2')}?format=zip&metric_type=run")
    path = Path(answer.path)
    assert answer.headers["content-disposition"] == "attachment; filename=metrics_study-2.zip"
    assert answer.media_type == "application/octet-stream"
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist()
        assert all(name.endswith((".txt", ".json", ".csv")) for name in archive.namelist())
    path.unlink()


def test_posted_metrics_are_among_those_of_the_run(ended: Ended) -> None:
    path = ended.runs["study-1"].folder / ".state" / "posted.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = [{"name": "mine @ 0", "date": date, "value": "3", "cumulative": True} for date in ("2026-02", "2026-01")]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    try:
        found = get(ended, f"/api/metrics/{number(ended, 'study-1')}?metric_type=run")["mine @ 0"]
    finally:
        path.unlink()
    assert [(sample["date"], sample["cumulative"]) for sample in found] == [("2026-01", True), ("2026-02", True)]
