"""Verification: every change is found and named, none ends in a traceback, and memory stays bounded."""

import hashlib
import io
import json
import os
import random
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbench_cli.errors import DamagedArchive, NotFoundError
from mlbench_cli.results.archive.files import REQUIRED, Archive, format_sums, pack
from mlbench_cli.results.archive.verify import find_problems, open_verified, verify_zip
from mlbench_cli.util.json_text import format_parsed
from tests.unit.results.archive.test_canonical_zip import write_zip
from tests.unit.results.archive.test_seal import _within
from tests.unit.results.runs import new_run, sealed_run


@cache
def golden() -> bytes:
    """A small archive, as a zip."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").mkdir()
        sealed = sealed_run(folder / "run" / "x")
        pack(sealed, folder / "x.zip")
        return (folder / "x.zip").read_bytes()


@cache
def contents() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(golden())) as zipped:
        return {name: zipped.read(name) for name in zipped.namelist()}


def codes(data: bytes) -> list[str]:
    return [problem.code for problem in verify_zip(io.BytesIO(data)).problems]


def reseal(**changes: bytes | None) -> bytes:
    """The golden archive with files replaced, added or (None) dropped, and with sums and headers that are right."""
    files = {**contents(), **changes}
    kept = {name: data for name, data in files.items() if data is not None and name != "SHA256SUMS"}
    kept["SHA256SUMS"] = format_sums({name: hashlib.sha256(data).hexdigest() for name, data in kept.items()})
    return write_zip(sorted(kept.items())).getvalue()


def edit(name: str, change: Callable[[dict[str, object]], Any]) -> bytes:
    """The golden archive with one JSON document changed, and everything else right."""
    document = json.loads(contents()[name])
    change(document)
    return reseal(**{name: format_parsed(document)})


def test_the_golden_archive_is_right() -> None:
    assert codes(golden()) == []
    assert reseal() == golden()


def test_flipped_bits_are_found() -> None:
    """All of some headers, and a sample of the rest; benchmarks/bit_flips.py tries all."""
    data = golden()
    end = data.index(b"PK\x01\x02")
    headers = [*range(8 * 50), *range(8 * end, 8 * (end + 60)), *range(8 * (len(data) - 22), 8 * len(data))]
    for position in [*headers, *random.Random(1).sample(range(8 * len(data)), 400)]:
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        assert codes(bytes(flipped)), f"bit {position}"


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(("set", "insert", "delete", "cut", "repeat")), st.integers(0, 1 << 16), st.binary(max_size=40)
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    for kind, number, payload in mutations:
        at = number % (len(data) + 1)
        if kind == "set":
            data = data[:at] + payload + data[at + len(payload) :]
        elif kind == "insert":
            data = data[:at] + payload + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + len(payload) :]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + data[max(0, at - 200) : at] + data[at:]
    return data


@settings(max_examples=400, deadline=None)
@given(MUTATIONS)
def test_every_mutation_of_a_zip_is_found(mutations: list[tuple[str, int, bytes]]) -> None:
    data = mutate(golden(), mutations)
    assert bool(codes(data)) == (data != golden())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(contents())), MUTATIONS)
def test_no_mutation_of_a_file_with_right_sums_ends_in_a_traceback(
    name: str, mutations: list[tuple[str, int, bytes]]
) -> None:
    data = mutate(contents()[name], mutations)
    found = codes(reseal(**{name: data}))
    if name in ("metrics.jsonl", "official_result.txt") and data != contents()[name]:
        assert found


# --- zips that others made ----------------------------------------------------------------------------------------


def test_a_wrong_crc_in_all_headers_is_found() -> None:
    """Whoever unzips the file with another program must not read that it is damaged."""
    crc = zlib.crc32(contents()["run.json"]).to_bytes(4, "little")
    assert golden().count(crc) == 2
    assert codes(golden().replace(crc, b"\0\0\0\0")) == ["changed"]


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "output/../../evil", "output//x", "a\\b", "out\nput", ".hidden", "./x", "x/"]
)
def test_unsafe_names(name: str) -> None:
    assert codes(write_zip(sorted({**contents(), name: b"x"}.items())).getvalue()) == ["unsafe_name"]
    if "\n" not in name:
        assert codes(_with_sums(f"{'0' * 64}  {name}\n")) == ["unsafe_name"]


def _with_sums(text: str) -> bytes:
    return write_zip(sorted({**contents(), "SHA256SUMS": text.encode()}.items())).getvalue()


def repack(change: Callable[[zipfile.ZipFile, str, bytes], None]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as zipped:
        for name, data in contents().items():
            change(zipped, name, data)
    return target.getvalue()


def test_what_another_program_packed_again_is_told_apart_from_damage(tmp_path: Path) -> None:
    """It compresses, adds folders, takes the files in any order, or keeps their dates."""
    for name, data in contents().items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(data)
    shutil.make_archive(str(tmp_path / "folder"), "zip", tmp_path, "run")
    disordered = write_zip(sorted(contents().items(), reverse=True)).getvalue()
    dated = repack(lambda zipped, name, data: zipped.writestr(zipfile.ZipInfo(name, (2024, 2, 2, 0, 0, 0)), data))
    for data in ((tmp_path / "folder.zip").read_bytes(), disordered, dated):
        (problem,) = verify_zip(io.BytesIO(data)).problems
        assert "another program packed this file again; unpack it, and verify the folder" in problem.message
    assert find_problems(tmp_path / "run") == []


def test_a_foreign_zip_is_no_archive() -> None:
    assert codes(write_zip([("photo.jpg", b"x")]).getvalue()) == ["not_an_archive"]


def test_declared_sizes_cost_no_memory(tmp_path: Path) -> None:
    declared = bytearray(golden())
    struct.pack_into("<II", declared, declared.index(b"PK\1\2") + 20, 0xFFFFFFF0, 0xFFFFFFF0)
    assert codes(bytes(declared)) == ["truncated"]
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w") as zipped:
        for name in ("SHA256SUMS", "metrics.jsonl", "run.json"):
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, (stat.S_IFREG | 0o644) << 16
            with zipped.open(info, "w") as file:
                for _ in range(150):
                    file.write(bytes(1 << 20))

    def check() -> None:
        assert [problem.code for problem in find_problems(path)] == ["too_large"]

    assert _within(60 << 20, check)


def test_deep_nesting_and_huge_numbers() -> None:
    for data in (b"[" * 100_000, b'{"a":' * 100_000, b'{"schema_version":' + b"9" * 5000 + b"}", b'{"a":NaN}', b"\xff"):
        assert codes(reseal(**{"result.json": data})) == ["schema"]
        assert codes(reseal(**{"resources.jsonl": data})) == ["schema"]


def test_many_small_values_cost_no_memory() -> None:
    import tracemalloc

    data = b'{"x":[' + b",".join([b"{}"] * 5_000_000) + b"]}"  # 15 MB, which took 1.2 GB
    archive = reseal(**{"result.json": data})
    tracemalloc.start()
    assert codes(archive) == ["schema"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


# --- sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("  ", " *"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text[:-1],
        lambda text: "\n" + text,
        lambda text: text.replace("run.json", "run.json "),
        lambda text: text.upper(),
        lambda text: "".join(sorted(text.splitlines(keepends=True), reverse=True)),
        lambda text: text + text.splitlines(keepends=True)[0],
        lambda text: "",
        lambda text: "\ufeff" + text,
    ],
)
def test_sums_have_one_form(change: Callable[[str], str]) -> None:
    assert codes(_with_sums(change(contents()["SHA256SUMS"].decode())))


# --- folders ------------------------------------------------------------------------------------------------------


def test_changes_of_a_folder_are_found_and_named(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    log = folder / "logs" / "rank-1.log"
    log.write_bytes(log.read_bytes() + b"\n")
    (folder / "metrics.jsonl").unlink()
    (folder / "output").mkdir()
    (folder / "output" / "more.bin").write_bytes(b"")
    (folder / "run.json").rename(tmp_path / "run.json")
    (folder / "run.json").symlink_to(tmp_path / "run.json")
    os.mkfifo(folder / "pipe")
    found = {(problem.code, problem.file) for problem in find_problems(folder)}
    assert found == {
        ("changed", "logs/rank-1.log"),
        ("missing", "metrics.jsonl"),
        ("extra", "output/more.bin"),
        ("link", "run.json"),
        ("missing", "run.json"),
        ("special", "pipe"),
    }


def test_files_of_the_tool_are_no_part_of_an_archive(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    (folder / ".state").mkdir()
    (folder / ".state" / "anything").write_text("x")
    (folder / "logs" / ".rank-0.log.tmp").write_text("x")
    assert find_problems(folder) == []


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.zip").touch()
    os.mkfifo(tmp_path / "pipe")
    run = new_run(tmp_path / "running")
    assert [problem.code for problem in find_problems(tmp_path / "empty")] == ["not_an_archive"]
    assert [problem.code for problem in find_problems(tmp_path / "empty.zip")] == ["not_an_archive"]
    assert [problem.code for problem in find_problems(tmp_path / "pipe")] == ["not_an_archive"]
    assert [problem.code for problem in find_problems(run.folder)] == ["unsealed"]
    with pytest.raises(NotFoundError):
        find_problems(tmp_path / "nowhere")
    with pytest.raises(NotFoundError):
        Archive.open(tmp_path / "nowhere")
    with pytest.raises(DamagedArchive, match=r"empty\.zip"):
        open_verified(tmp_path / "empty.zip")


# --- contents -----------------------------------------------------------------------------------------------------


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for key in parents:
            document = document[key]
        document[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("goal.value", 99.0),
        ("goal.value", 10.0),
        ("goal.threshold", 70.0),
        ("goal.reached", False),
        ("goal.seconds", None),
        ("goal.seconds.wall", 0.5),
        ("division.word", "closed"),
        ("wall_seconds", 0.1),
        ("started", "2025-10-09T08:53:21.000Z"),
        ("exit_code", 7),
        ("ended", "failed"),
        ("summary", "run-2 was splendid."),
        ("metrics.val_loss", 0.0),
        ("price", {"amount": 0.0}),
        ("details.best", 99.0),
        ("goal.seconds.training", 1.0),
        ("task_seconds.wall", 1.0),
        ("timings.forward.rank0", 0.5),
        ("official_line", None),
        ("official_line", "80% reached in 0.001 seconds"),
        ("run", "another"),
        ("workers", 64),
        ("backend", "nccl"),
        ("synthetic", True),
        ("label.word", "functional"),
        ("outcome", "completed"),
        ("worker_states", []),
    ],
)
def test_a_result_that_contradicts_the_rest_is_found(path: str, value: Any) -> None:
    assert set(codes(edit("result.json", _set(path, value)))) == {"inconsistent"}


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("result.json", "schema_version", 2),
        ("result.json", "schema_version", True),
        ("result.json", "outcome", "splendid"),
        ("result.json", "finished", "yesterday"),
        ("result.json", "timings", {"forward": {"min": 1}}),
        ("result.json", "goal", {"metric": 1}),
        ("result.json", "label.word", "splendid"),
        ("result.json", "worker_states", None),
        ("result.json", "exit_code", "0"),
        ("run.json", "spec", []),
        ("run.json", "name", None),
        ("run.json", "repeats", -1),
        ("run.json", "repeats", True),
        ("run.json", "created", "now"),
        ("run.json", "created", "2025-13-09T08:53:19.000Z"),
        ("run.json", "created", "2025-10-09T08:53:19+00:00"),
        ("run.json", "more", "of a stranger"),
        ("findings.json", "findings", [1]),
        ("environment.json", "ranks", {"0": 1}),
    ],
)
def test_schema_errors_are_found(file: str, path: str, value: Any) -> None:
    assert set(codes(edit(file, _set(path, value)))) == {"schema"}


def test_a_missing_field_is_named() -> None:
    (problem,) = verify_zip(io.BytesIO(edit("result.json", lambda document: document.pop("updates")))).problems
    assert str(problem) == "result.json: Object missing required field `updates`"


def test_a_run_spec_with_another_hash_is_found() -> None:
    assert codes(edit("run.json", _set("spec.seed", 43))) == ["inconsistent"]


def test_metrics_must_follow_from_the_logs() -> None:
    metrics = contents()["metrics.jsonl"]
    assert codes(reseal(**{"metrics.jsonl": metrics.replace(b"60.0", b"81.0")})) == ["inconsistent"]
    assert codes(reseal(**{"metrics.jsonl": metrics + metrics.splitlines(keepends=True)[0]})) == ["inconsistent"]
    assert codes(reseal(**{"logs/rank-0.log": None})) == ["inconsistent"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("README.html", "extra"),
        ("logs/rank-00.log", "extra"),
        ("logs/rank-2.log", "extra"),
        ("Run.json", "extra"),
        ("output/rank-0/CON", "unsafe_name"),
        ("output/rank-0/lpt1.txt", "unsafe_name"),
        ("output/rank-0/a:b", "unsafe_name"),
        ("output/rank-0/a.", "unsafe_name"),
        ("output/rank-0/\u202egpj.exe", "unsafe_name"),
        ("output/rank-0/\x9b2J", "unsafe_name"),
    ],
)
def test_a_file_that_an_archive_does_not_have_or_that_is_another_one_elsewhere_is_refused(name: str, code: str) -> None:
    assert code in codes(reseal(**{name: b"x"}))


@pytest.mark.parametrize(
    ("first", "second"),
    [("a", "A"), ("stra\u00dfe", "STRASSE"), ("e\u0301", "\u00e9"), ("a", "A/x"), ("b/A/x", "b/a")],
)
def test_names_that_are_one_on_some_systems_are_refused(first: str, second: str) -> None:
    assert codes(reseal(**{"output/rank-0/A/b": b"1", "output/rank-0/a/c": b"2"})) == []  # one folder, but two files
    data = reseal(**{f"output/rank-0/{first}": b"1", f"output/rank-0/{second}": b"2"})
    assert codes(data) == ["unsafe_name"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("result.json", lambda data: data.replace(b'  "wall_seconds"', b'  "wall_seconds": 0.1,\n  "wall_seconds"')),
        ("run.json", lambda data: data.replace(b"\n", b"\n ")),
        ("observation.json", lambda data: data.replace(b"103.0", b"103.00")),
        ("resources.jsonl", lambda data: data + b'{"kind":"machine", "elapsed_seconds":1}\n'),
    ],
)
def test_a_document_has_one_form(file: str, change: Callable[[bytes], bytes]) -> None:
    assert codes(reseal(**{file: change(contents()[file])}))


def test_every_required_file_is_missed() -> None:
    for name in REQUIRED:
        assert codes(reseal(**{name: None})) == ["missing"]


def test_two_entries_of_a_zip_can_be_read_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "run.zip"
    path.write_bytes(golden())
    with Archive.open(path) as archive:
        pairs = list(zip(archive.lines("metrics.jsonl"), archive.lines("logs/rank-1.log"), strict=False))
    assert [first for first, _ in pairs] == contents()["metrics.jsonl"].splitlines(keepends=True)[: len(pairs)]
