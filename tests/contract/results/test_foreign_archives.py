"""Archives of strangers, and odd ones: nothing is written elsewhere, and no command hangs or breaks."""

import hashlib
import json
import os
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.model.spec import canonical_json
from mlbench_cli.results.archive.files import MAX_FILES, pack
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal, write_sums
from mlbench_cli.storage.store import Store
from tests.contract.server.dashboards import serve
from tests.unit.results.runs import event, new_run, observation_of, sealed_run, spec, training_log

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("field", "plain", "hostile"),
    [
        ("task", "a-task", "../../../evil"),
        ("task", "a-task", "a/b"),
        ("task", "a-task", "t" * 300),
        ("cluster", "a-cluster", "x; touch evil"),
        ("name", "a-2", "../evil"),
    ],
)
def test_no_name_in_an_archive_leads_elsewhere(
    tmp_path: Path, capsys: Captured, field: str, plain: str, hostile: str
) -> None:
    """Pages, folders and suggested commands have the names of tasks, runs and clusters."""
    own = {"task": "a-task", "name": "a-2", "cluster": "a-cluster", "engine": "slurm", "cluster_kind": "slurm"}
    folder = sealed_run(tmp_path / "in" / "run", **own)
    assert run(["verify", str(folder)]) == 0
    for path in (folder / "run.json", folder / "result.json"):
        path.write_text(path.read_text().replace(plain, hostile))
    document = json.loads((folder / "run.json").read_text())
    if field == "name":  # else it is refused as no name of a run
        document["spec"]["name"] = plain
    document["spec_hash"] = hashlib.sha256(canonical_json(document["spec"])).hexdigest()[:16]
    (folder / "run.json").write_text(json.dumps(document, indent=2) + "\n")
    write_sums(folder)
    assert run(["verify", str(folder)]) == 2
    before = {*tmp_path.rglob("*")}
    assert run(["site", str(tmp_path / "in"), "--to", str(tmp_path / "of" / "site")]) == 7
    assert {path.name for path in {*tmp_path.rglob("*")} - before} <= {"of"}


def test_a_zip_that_is_encrypted_a_pipe_or_has_a_million_files_is_no_archive(tmp_path: Path, capsys: Captured) -> None:
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as zipped:
        zipped.writestr("a.zip", "")
    data = (tmp_path / "one.zip").read_bytes()
    begin, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    secret = bytearray(data)
    secret[6] |= 1
    secret[begin + 8] |= 1
    (tmp_path / "secret.zip").write_bytes(secret)
    os.mkfifo(tmp_path / "pipe.zip")
    count = MAX_FILES + 1
    sizes = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, count * (end - begin), begin)
    place = struct.pack("<IQI", 0, begin + count * (end - begin), 1)
    tail = struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    many = data[:begin] + data[begin:end] * count + b"PK\6\6" + sizes + b"PK\6\7" + place + b"PK\5\6" + tail
    (tmp_path / "many.zip").write_bytes(many)
    said = {"secret": "encrypted", "pipe": "neither a folder nor a file", "many": f"more than {MAX_FILES} files"}
    for name, why in said.items():
        assert run(["verify", str(tmp_path / f"{name}.zip")]) == 2
        printed = capsys.readouterr()
        assert why in printed.out + printed.err


def test_a_file_of_several_archives_that_was_packed_again_hides_no_other(tmp_path: Path, capsys: Captured) -> None:
    pack(sealed_run(tmp_path / "run", name="a-2"), tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "again.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.write(tmp_path / "a.zip", "a.zip")
    assert run(["verify", str(tmp_path)]) == 2
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'a.zip'}: ok" in shown
    assert "again.zip: 1 problem" in shown
    assert "unpack it" in shown


def test_a_zip_may_end_in_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """As some mail programs and file systems give it back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mail").mkdir()
    pack(sealed_run(tmp_path / "run", name="a-2"), tmp_path / "mail/A.ZIP")
    for words in (
        ["verify", "mail"],
        ["verify", "mail/A.ZIP"],
        ["report", "a.html", "mail"],
        ["compare", *["mail/A.ZIP"] * 2],
    ):
        assert run(words) in (0, 9), words
    assert "mail/A.ZIP: ok" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mail")
    assert run(["report", "a.html", "A.ZIP"]) == 0


def test_folders_nested_deeper_than_python_calls_are_sealed_verified_and_deleted(home: Path) -> None:
    store = Store()
    made = store.record_run(spec(name="deep-2"))
    new_run(made.folder, made.spec)
    deep = str(made.folder / "output")
    for _ in range(1010):
        os.mkdir(deep)
        deep += "/d"
    Path(deep).write_text("x")
    write_run_document(made)
    seal(made, observation_of(2, 103.0))
    store.advance(made, RunState.FINISHED, Outcome.GOAL_REACHED)
    store.close()
    assert run(["verify", str(made.folder)]) == 0
    assert run(["delete", "deep-2", "--yes"]) == 0
    assert not [*(home / "runs").iterdir()]


@pytest.mark.parametrize(
    "reported",
    [
        {"details": {"compile_seconds": 10**400}},
        {"details": {"throughput_protocol": {"rates": [1.7e308] * 5, "unit": "samples"}}},
        {"details": {"global_batch": 1e308, "communication": [1]}},
        {"environment": {"cpu": "x", "gpus": 4, "packages": 7, "cpu_quota": "1"}},
    ],
)
def test_what_a_program_reports_in_another_form_is_presented_all_the_same(
    tmp_path: Path, reported: dict[str, Any]
) -> None:
    plain, odd = sealed_run(tmp_path / "a", name="a-2"), sealed_run(tmp_path / "b", name="b-2", **reported)
    assert run(["verify", str(odd)]) == 0
    assert run(["compare", str(plain), str(odd)]) == 0
    assert run(["gate", str(odd), "--baseline", str(plain), "--check", "throughput"]) == 9
    assert run(["report", str(tmp_path / "both.html"), str(plain), str(odd)]) == 0
    assert run(["site", str(odd), "--to", str(tmp_path / "site")]) == 0
    assert run(["predict", str(odd), "-o", "json"]) == 2  # it is no training of the catalog


def test_a_page_draws_the_goal_and_the_first_of_hundreds_of_metrics(tmp_path: Path) -> None:
    """Such as a norm of each layer, reported before the metric of the goal."""
    store = Store(tmp_path)
    made = store.record_run(spec(name="norms-2"))
    norms = [event("metric", at=step, name=f"norm {layer}", value=1.0) for step in range(1, 3) for layer in range(300)]
    begin, *rest = training_log(0)
    new_run(made.folder, made.spec, {0: [begin, *norms, *rest], 1: training_log(1)})
    write_run_document(made)
    seal(made, observation_of(2, 103.0))
    store.advance(made, RunState.FINISHED, Outcome.GOAL_REACHED)
    store.close()
    with serve(tmp_path) as dashboard:
        page = dashboard.ask("/runs/norms-2").body.decode()
        assert "val_Prec@1" in dashboard.ask("/api/v1/runs/norms-2").document["metric_figures"]
    assert 'id="figure-run-goal-metric"' in page
    assert page.count('id="figure-run-metric') < 20


def test_more_archives_than_a_process_may_open_files_are_read(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run", name="a-2")
    (tmp_path / "in").mkdir()
    for number in range(40):
        pack(folder, tmp_path / "in" / f"{number}.zip")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        assert run(["report", str(tmp_path / "all.md"), str(tmp_path / "in")]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
