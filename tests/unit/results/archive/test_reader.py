"""Reading, packing and unpacking an archive: its files, what is shown of it, and each refusal with its reason."""

import io
import json
import os
import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest

from mlbench_cli.errors import DamagedArchive, MlbenchError, NotFoundError, UsageError
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.mlbench_v3 import export_v3, machine_series, original_names, task_series
from mlbench_cli.results.archive.pack import pack, unpack, write_zip
from mlbench_cli.results.archive.reader import Archive, Folder
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.util import files
from tests.unit.results.runs import START, new_run, observation_of, sealed_run

SAMPLES = [
    {"time": START + at, "rank": rank, "cpu_seconds": 2.0 * at, "rss_bytes": 1 << 20, "sent_bytes": 5 << 20}
    for at in (0, 4, 6)
    for rank in (0, 1)
]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed_run(tmp_path_factory.mktemp("archives") / "a", samples=SAMPLES)


def refusal(caught: pytest.ExceptionInfo[DamagedArchive]) -> tuple[str, str, str]:
    return caught.value.file, caught.value.problem, caught.value.plain


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_folder_and_its_zip_have_the_same_contents(sealed: Path, tmp_path: Path) -> None:
    pack(sealed, tmp_path / "a.zip")
    with Archive.open(sealed) as folder, Archive.open(tmp_path / "a.zip") as zipped:
        assert folder.names == zipped.names == tuple(sorted(folder.names))
        assert folder.logs == zipped.logs == {0: "logs/rank-0.log", 1: "logs/rank-1.log"}
        for name in folder.names:
            assert folder.read(name) == zipped.read(name)
            assert folder.size(name) == zipped.size(name) == len(folder.read(name))
        assert list(folder.metrics()) == list(zipped.metrics())
        assert list(folder.resources()) == list(zipped.resources())
        assert len(list(folder.resources())) == len(SAMPLES)
        assert repr(folder) == f"<archive {sealed}>"


def test_a_zip_is_closed_with_its_archive(sealed: Path, tmp_path: Path) -> None:
    pack(sealed, tmp_path / "a.zip")
    with Archive.open(tmp_path / "a.zip") as zipped:
        pass
    with pytest.raises(ValueError, match="closed file"):
        zipped.read("run.json")


def test_events_are_those_of_one_rank_or_of_all(sealed: Path) -> None:
    with Archive.open(sealed) as archive:
        ranks = [[event["rank"] for event in archive.events(rank)] for rank in (None, 0, 1, 7)]
    assert set(ranks[0]) == {0, 1}
    assert [set(each) for each in ranks[1:]] == [{0}, {1}, set()]
    assert ranks[0] == ranks[1] + ranks[2]


def test_text_is_cleaned_only_where_it_is_shown(sealed: Path) -> None:
    with Archive.open(sealed, is_shown=True) as shown, Archive.open(sealed) as plain:
        for archive in (shown, plain):
            archive.document = lambda name: {"a\x1b": ["\x1b[2J", 1]}  # type: ignore[method-assign]
        assert json.dumps(shown.environment) == json.dumps({"a\\x1b": ["\\x1b[2J", 1]})
        assert json.dumps(plain.environment) == json.dumps({"a\x1b": ["\x1b[2J", 1]})


def test_what_could_not_be_proven_is_marked_wherever_it_is_shown(sealed: Path) -> None:
    with Archive.open(sealed, not_derived=["x"]) as archive, Archive.open(sealed) as plain:
        assert archive.not_derived == ("x",)
        assert archive.run["name"] == f"{plain.run['name']} (unproven)"
        assert archive.run["spec"]["task"] == "unknown-task (unproven)"
        assert archive.result["run"] == f"{plain.result['run']} (unproven)"
        assert archive.result["task"] == "unknown-task (unproven)"
        assert archive.result["summary"] == f"(unproven) {plain.result['summary']}"
        line = plain.result["official_line"]
        assert archive.result["official_line"] == (None if line is None else f"(unproven) {line}")
        assert "unproven" not in json.dumps(plain.run)


def test_findings_that_are_no_list_are_none(sealed: Path) -> None:
    with Archive.open(sealed) as archive:
        archive.document = lambda name: {"findings": "many"}  # type: ignore[method-assign]
        assert archive.findings == []


def test_a_path_without_an_archive_is_told_from_one_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no archive"):
        Archive.open(tmp_path / "none")
    (tmp_path / "text.zip").write_text("hello")
    with pytest.raises(DamagedArchive) as caught:
        Archive.open(tmp_path / "text.zip")
    assert refusal(caught) == ("", "not_an_archive", "it does not start like a zip file")


def test_a_missing_file_says_whether_the_run_is_unfinished(sealed: Path, tmp_path: Path) -> None:
    with Archive.open(sealed) as archive, pytest.raises(DamagedArchive) as caught:
        archive.read("network.json")
    assert refusal(caught) == ("network.json", "missing", "it is missing")
    with Archive.open(new_run(tmp_path / "new").folder) as archive, pytest.raises(DamagedArchive) as caught:
        archive.read("result.json")
    assert refusal(caught) == (
        "result.json",
        "missing",
        "it is missing: the run has not finished, or its results have not been fetched (mlbench wait NAME)",
    )


def test_a_file_may_be_as_long_as_the_limit_but_not_longer(sealed: Path) -> None:
    with Archive.open(sealed) as archive:
        size = archive.size("run.json")
        assert len(archive.read("run.json", size)) == size
        with pytest.raises(DamagedArchive) as caught:
            archive.read("run.json", size - 1)
    assert refusal(caught) == ("run.json", "too_large", f"it has more than {size - 1} bytes")


def test_lines_are_cut_at_the_limit_of_a_document(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Archive.open(sealed) as archive:
        whole = archive.read("metrics.jsonl")
        assert b"".join(archive.lines("metrics.jsonl")) == whole
        monkeypatch.setattr(layout, "MAX_DOCUMENT_BYTES", 10)
        pieces = list(archive.lines("metrics.jsonl"))
    assert max(map(len, pieces)) == 10
    assert b"".join(pieces) == whole


def test_a_row_that_is_no_object_is_named_by_its_line(sealed: Path) -> None:
    with Archive.open(sealed) as archive:
        archive.lines = lambda name: iter([b'{"a": 1}\n', b"[2]\n"])  # type: ignore[method-assign]
        rows = archive.rows("metrics.jsonl")
        assert next(rows) == {"a": 1}
        with pytest.raises(DamagedArchive, match="line 2: ") as caught:
            next(rows)
        assert caught.value.problem == "schema"
        doubled = archive.rows("metrics.jsonl", lambda line: line.replace(b"1", b"2"))
        assert next(doubled) == {"a": 2}


def bare(folder: Path, resources: str = "", **changes: object) -> Path:
    """A folder with a result and samples alone, which nobody has verified."""
    (folder / "output").mkdir(parents=True)
    result = {"schema_version": 1, "data": "a\x1b", **changes}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "resources.jsonl").write_text(resources)
    return folder


def test_a_damaged_block_of_samples_is_found_unless_it_was_checked_before(tmp_path: Path) -> None:
    block = {"kind": "samples", "rank": None, "time": {"decimals": 3, "steps": [1000]}}
    folder = bare(tmp_path / "a", json.dumps({"rank": 0}) + "\n" + json.dumps(block) + "\n")
    with Archive.open(folder) as archive:
        rows = archive.samples()
        assert next(rows) == {"rank": 0}
        with pytest.raises(DamagedArchive) as caught:
            next(rows)
        assert refusal(caught) == ("resources.jsonl", "schema", "a block of samples without a rank")
        archive.has_checked_samples = True
        assert len(list(archive.samples())) == 2


def test_the_first_sample_of_each_block_can_be_read_alone(tmp_path: Path) -> None:
    block = {"kind": "samples", "rank": 0, "time": {"decimals": 3, "steps": [1000, 5]}, "x": {"steps": [7, 1]}}
    folder = bare(tmp_path / "a", json.dumps(block, separators=(",", ":")) + "\n")
    with Archive.open(folder) as archive:
        (cut,) = archive.samples(only_first=True)
        assert cut == {**block, "time": {"decimals": 3, "steps": [1000]}, "x": {"steps": [7]}}
        assert [row["x"] for row in archive.resources()] == [7, 8]
        assert list(archive.samples()) == [block]


def test_text_is_unchanged_unless_it_is_to_be_shown(tmp_path: Path) -> None:
    container = Folder(bare(tmp_path / "a"))
    assert Archive("a", container).result["data"] == "a\x1b"
    assert Archive("a", container, is_shown=True).result["data"] == "a\\x1b"
    assert repr(Archive("a", container)) == "<archive a>"


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bare(tmp_path / "a")

    def fail(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(MlbenchError) as caught:
        Archive.open(folder)
    assert caught.value.message == f"{folder} cannot be read: Permission denied."


def test_a_file_that_fails_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

        readline = read

    archive = Archive.open(bare(tmp_path / "a"))
    monkeypatch.setattr(archive, "open_file", lambda name: Broken())
    for read in (lambda: archive.read("result.json"), lambda: list(archive.lines("resources.jsonl"))):
        with pytest.raises(DamagedArchive) as caught:
            read()
        assert caught.value.problem == "unreadable"
        assert caught.value.plain == "it cannot be read: [Errno 5] Input/output error"


# --- packing --------------------------------------------------------------------------------------------------------


def test_a_packed_archive_cannot_be_packed_again(sealed: Path, tmp_path: Path) -> None:
    pack(sealed, tmp_path / "a.zip")
    with pytest.raises(UsageError, match=r"a\.zip is already packed") as caught:
        pack(tmp_path / "a.zip", tmp_path / "b.zip")
    assert caught.value.hint == f"cp {tmp_path / 'a.zip'} {tmp_path / 'b.zip'}"
    with pytest.raises(UsageError, match="is a folder"):
        pack(sealed, tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "problem", "message"),
    [
        ("run.json", None, "missing", "it is missing"),
        ("output/new", b"x", "extra", "it is not part of the sealed archive"),
        ("result.json", b"{}", "changed", "it has changed since it was sealed"),
    ],
)
def test_only_what_was_sealed_is_packed(
    tmp_path: Path, name: str, data: bytes | None, problem: str, message: str
) -> None:
    folder = sealed_run(tmp_path / "a")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(DamagedArchive) as caught:
        pack(folder, tmp_path / "a.zip")
    assert refusal(caught) == (name, problem, message)
    assert not (tmp_path / "a.zip").exists()


def test_a_signature_is_packed_although_it_is_not_sealed(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "a")
    (folder / "SHA256SUMS.sig").write_text("signature")
    pack(folder, tmp_path / "new" / "a.zip")
    with ZipFile(tmp_path / "new" / "a.zip") as zipped:
        assert zipped.read("SHA256SUMS.sig") == b"signature"


def test_files_are_replaced_and_added_in_the_order_of_names(sealed: Path, tmp_path: Path) -> None:
    with Archive.open(sealed) as archive:
        write_zip(archive, tmp_path / "b.zip", {"result.json": b"{}", "a": b"new"})
        names = archive.names
    with ZipFile(tmp_path / "b.zip") as zipped:
        assert zipped.namelist() == sorted([*names, "a"])
        assert (zipped.read("result.json"), zipped.read("a")) == (b"{}", b"new")


def test_an_archive_is_unpacked_as_it_was_sealed(sealed: Path, tmp_path: Path) -> None:
    pack(sealed, tmp_path / "a.zip")
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new" / "deep", tmp_path / "empty"):
        unpack(tmp_path / "a.zip", target)
        with Archive.open(sealed) as one, Archive.open(target) as other:
            assert one.names == other.names
            assert all(one.read(name) == other.read(name) for name in one.names)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["deep"]
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(UsageError, match="exists and is not empty"):
            unpack(tmp_path / "a.zip", target)


def test_files_in_deep_folders_are_packed_and_unpacked(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for name in ("a", "deep/er/b", "deep/er/c"):
        path = run.folder / "output" / "rank-0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    seal(run, observation_of())
    pack(run.folder, tmp_path / "new" / "deep" / "a.zip")
    unpack(tmp_path / "new" / "deep" / "a.zip", tmp_path / "back")
    assert (tmp_path / "back" / "output" / "rank-0" / "deep" / "er" / "c").read_text() == "deep/er/c"
    with Archive.open(tmp_path / "back") as one, Archive.open(run.folder) as other:
        assert one.names == other.names


def test_a_full_disk_leaves_nothing_of_an_archive_behind(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(sealed, tmp_path / "a.zip")

    def fail(source: object, target: object, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(MlbenchError) as caught:
        unpack(tmp_path / "a.zip", tmp_path / "new")
    assert caught.value.message == f"{tmp_path / 'new'} cannot be written: No space left on device."
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_a_place_in_which_no_archive_can_be_is_named(sealed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MlbenchError, match=r"file(/new)?(/.*)? cannot be written: (Not a directory|File exists)\."):
        pack(sealed, tmp_path / "file" / "a.zip")


def test_a_file_that_changes_while_it_is_packed_is_refused(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Archive.open(sealed) as archive:
        monkeypatch.setattr(archive, "size", lambda name: 5)
        with pytest.raises(DamagedArchive) as caught:
            write_zip(archive, tmp_path / "a.zip", {})
        size = len(archive.read("SHA256SUMS"))
    assert refusal(caught) == ("SHA256SUMS", "changed", f"it changed from 5 to {size} bytes while it was read")
    assert not (tmp_path / "a.zip").exists()


def test_names_of_archives_are_on_disk_when_packing_and_unpacking_return(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, bool]] = []
    zipped, folder = tmp_path / "a.zip", tmp_path / "new"

    def sync(path: Path) -> None:
        synced.append((path, zipped.exists() and (folder.exists() or not synced)))

    monkeypatch.setattr(files, "sync_folder", sync)
    pack(sealed, zipped)
    unpack(zipped, folder)
    assert synced == [(tmp_path, True)] * 2


# --- the format of MLBench 3 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank", "goal", "names"),
    [
        ("train_loss", 0, "Prec@1", ["train_loss"]),
        ("val_loss", 0, "Prec@1", ["val_loss", "val_global_loss"]),
        ("val_loss", 1, "Prec@1", ["val_loss"]),
        ("val_global_Prec@1", 0, "Prec@1", ["val_Prec@1", "val_global_Prec@1"]),
        ("Prec@1", 0, "Prec@1", ["val_Prec@1", "val_global_Prec@1"]),
        ("Prec@1", 0, None, ["Prec@1"]),
    ],
)
def test_metrics_have_the_names_that_old_scripts_read(name: str, rank: int, goal: str | None, names: list[str]) -> None:
    assert list(original_names({"name": name, "rank": rank}, goal)) == names


def test_times_of_the_old_format_are_rank_0s_parts(sealed: Path) -> None:
    with Archive.open(sealed) as archive:
        series = task_series(archive)
        finished = archive.result["finished"]
    totals = {name: values for name, values in series.items() if "um" in name.partition("@")[0] and "Train" not in name}
    assert {name: [float(str(each["value"])) for each in values] for name, values in totals.items()} == {
        "result_global_cum_agg @ 0": [24.0],
        "result_global_cum_backprop @ 0": [32.0],
        "result_global_cum_batch_load @ 0": [2.0],
        "result_global_cum_comp_loss @ 0": [2.0],
        "result_global_cum_comp_metrics @ 0": [3.0],
        "result_global_cum_end @ 0": [pytest.approx(2.0)],  # 86 s of training less the other parts
        "result_global_cum_fwd_pass @ 0": [16.0],
        "result_global_cum_opt_step @ 0": [5.0],
    }
    assert series["result_TotalCumulativeTrainTime @ 0"] == [{"date": finished, "value": "86.0", "cumulative": False}]


def test_machines_of_the_old_format_have_rates_and_mebibytes(sealed: Path) -> None:
    with Archive.open(sealed) as archive:
        series = machine_series(archive)
        name = archive.run["name"]
    assert sorted(series) == [f"{name}-{rank}_{what}" for rank in (0, 1) for what in ("cpu", "memory", "network_out")]
    assert [each["value"] for each in series[f"{name}-0_cpu"]] == ["2.0", "2.0"]
    assert [(each["value"], each["cumulative"]) for each in series[f"{name}-1_memory"]] == [("1.0", False)] * 3
    assert [(each["value"], each["cumulative"]) for each in series[f"{name}-1_network_out"]] == [("5.0", True)] * 3


def test_an_export_needs_a_file_and_has_a_fixed_date(sealed: Path, tmp_path: Path) -> None:
    with Archive.open(sealed) as archive:
        with pytest.raises(UsageError, match="is a folder"):
            export_v3(archive, tmp_path)
        export_v3(archive, tmp_path / "new" / "x.zip")
    with ZipFile(tmp_path / "new" / "x.zip") as zipped:
        infos = zipped.infolist()
    assert [info.filename for info in infos] == sorted(info.filename for info in infos)
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert {info.external_attr >> 16 for info in infos} == {0o644}
