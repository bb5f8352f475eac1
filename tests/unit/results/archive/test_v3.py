"""The old zip, read in the way of the scripts that were written for it."""

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from mlbench_cli.results.archive.mlbench_v3 import export_v3
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.seal import seal
from tests.unit.results.runs import START, new_run, observation_of, sealed_run


@pytest.fixture
def old_zip(tmp_path: Path) -> Path:
    run = new_run(tmp_path / "run")
    samples = [
        {"time": START + 5 * index, "rank": 0, "cpu_seconds": 10.0 * index, "rss_bytes": 64 << 20} for index in range(3)
    ]
    (run.folder / "resources.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    seal(run, observation_of())
    target = tmp_path / "metrics_gloo-2.zip"
    with Archive.open(run.folder) as archive:
        export_v3(archive, target)
    return target


def read(zipped: ZipFile, name: str) -> list[dict[str, Any]]:
    entries = list(json.loads(zipped.read(name)))
    assert all(set(entry) == {"date", "value", "cumulative"} for entry in entries)
    return entries


def test_names_and_backend_come_from_the_file_name(old_zip: Path) -> None:
    stem = os.path.splitext(os.path.basename(old_zip))[0]
    assert (stem.split("_")[-1].split("-")[0].upper(), int(stem.split("-")[-1])) == ("GLOO", 2)


def test_cumulative_times(old_zip: Path) -> None:
    prefix = "result_global_cum_"
    times = {}
    with ZipFile(old_zip) as zipped:
        for file in (name for name in zipped.namelist() if prefix in name):
            name, _, _ = os.path.splitext(file)[0].replace(prefix, "").split()
            times[name] = float(read(zipped, file)[0]["value"])
        total = float(read(zipped, "result_TotalCumulativeTrainTime @ 0.json")[0]["value"])
    assert times.pop("CumulativeTrainTimeEpoch") == total == 86.0
    assert set(times) == {
        *("agg", "backprop", "batch_load", "comp_loss", "comp_metrics", "end", "fwd_pass", "opt_step"),
    }
    assert sum(times.values()) == pytest.approx(total)


def test_losses_of_all_ranks_have_one_length(old_zip: Path) -> None:
    with ZipFile(old_zip) as zipped:
        for key in ("result_train_loss", "result_val_loss"):
            files = [name for name in zipped.namelist() if key in name]
            values = [[float(entry["value"]) for entry in read(zipped, file)] for file in files]
            assert [len(row) for row in values] == [3, 3]


def test_what_the_old_status_asked_for(old_zip: Path) -> None:
    with ZipFile(old_zip) as zipped:
        assert [entry["value"] for entry in read(zipped, "result_val_global_Prec@1 @ 0.json")] == [
            "40.0",
            "60.0",
            "80.5",
        ]
        assert read(zipped, "result_val_global_loss @ 0.json") == read(zipped, "result_val_loss @ 0.json")
        assert zipped.read("official_result.txt").startswith(b"Prec@1 >= 80 reached in 86.000 seconds, Compute: ")
        text = zipped.read("result_val_loss @ 0.json").decode()
    entry = json.loads(text)[0]
    assert datetime.strptime(entry["date"], "%Y-%m-%dT%H:%M:%S.%fZ")
    assert isinstance(entry["value"], str)
    assert text.startswith('[\n    {\n        "date": ')


def test_machines(old_zip: Path) -> None:
    with ZipFile(old_zip) as zipped:
        assert [entry["value"] for entry in read(zipped, "demo-2-0_cpu.json")] == ["2.0", "2.0"]
        assert [entry["value"] for entry in read(zipped, "demo-2-0_memory.json")] == ["64.0"] * 3


def test_the_same_archive_gives_the_same_bytes(tmp_path: Path) -> None:
    with Archive.open(sealed_run(tmp_path / "run", "failed")) as archive:
        export_v3(archive, tmp_path / "a.zip")
        export_v3(archive, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with ZipFile(tmp_path / "a.zip") as zipped:
        assert zipped.read("official_result.txt").startswith(b"No official result: the run failed")
