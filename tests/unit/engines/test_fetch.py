"""What comes from the machines of a run: by digest, continued where it broke off, and nothing outside its folder."""

import hashlib
import io
import json
import shutil
import tarfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.engines.fetch import ATTEMPTS, FetchError, check_logs, download, fetch_archive, merge_resources
from mlbench_cli.engines.observe import NodeReport
from mlbench_cli.model.run import Run
from mlbench_cli.storage.run_folder import FAULTS
from tests.unit.results.runs import new_run

Usage = namedtuple("Usage", "total used free")


class Machine:
    """A channel to a machine that has one file; `spoil` changes the pieces that it sends."""

    def __init__(self, content: bytes) -> None:
        self.target = SimpleNamespace(name="m1")
        self.content = content
        self.spoil: list[bytes] = []
        self.offsets: list[int] = []
        self.piece = 1 << 20  # bytes to ask for at once

    def exchange(self, do: str, *, path: str, offset: int, size: int) -> tuple[dict[str, Any], bytes]:
        assert (do, path) == ("get", "/place/.state/archive.tar")
        self.offsets.append(offset)
        piece = self.spoil.pop() if self.spoil else self.content[offset : offset + size]
        return {"size": len(self.content)}, piece

    @property
    def facts(self) -> dict[str, Any]:
        return {"size": len(self.content), "sha256": hashlib.sha256(self.content).hexdigest()}

    def download(self, part: Path) -> None:
        download(self, "/place/.state/archive.tar", self.facts, part)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return new_run(tmp_path / "run")


def pack(*members: tuple[str, bytes | None], links: tuple[tuple[str, str, bytes], ...] = ()) -> bytes:
    """A tar of files, folders (None), and what has a type of its own: name, target and type."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            info.mode, info.size = 0o4777, len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))
        for name, to, kind in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, to
            archive.addfile(info)
    return target.getvalue()


def fetch(run: Run, machine: Machine, node: int = 0) -> tuple[int, int] | None:
    report = NodeReport(None, {"archive": machine.facts, "logs": {}, "problem": None})
    return fetch_archive(machine, "/place", report, node, run)  # type: ignore[arg-type]


# --- download --------------------------------------------------------------------------------------------------------


def test_a_file_comes_in_pieces_and_a_broken_transfer_is_continued(tmp_path: Path) -> None:
    machine, part = Machine(b"0123456789"), tmp_path / "part"
    machine.piece = 4
    part.write_bytes(b"012")
    machine.download(part)
    assert part.read_bytes() == machine.content
    assert machine.offsets == [3, 7]
    machine.download(part)  # all of it is here
    assert machine.offsets == [3, 7]


def test_damaged_bytes_are_fetched_again_from_the_beginning(tmp_path: Path) -> None:
    machine = Machine(b"0123456789")
    machine.spoil = [b"012345678x"] * (ATTEMPTS - 1)
    machine.download(tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == machine.content
    assert machine.offsets == [0] * ATTEMPTS


@pytest.mark.parametrize("piece", [b"012345678x", b""], ids=["damaged", "no more there"])
def test_bytes_that_never_come_right_are_an_error_that_names_the_machine(tmp_path: Path, piece: bytes) -> None:
    machine = Machine(b"0123456789")
    machine.spoil = [piece] * ATTEMPTS
    with pytest.raises(FetchError, match=r"/place/\.state/archive\.tar from m1"):
        machine.download(tmp_path / "part")
    assert machine.offsets == [0] * ATTEMPTS
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("missing", [0, 1])
def test_twice_the_size_must_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    """The archive, and what is unpacked from it."""
    machine = Machine(b"x" * (3 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, (6 << 20) - missing))
    if not missing:
        machine.download(tmp_path / "part")
        return
    with pytest.raises(FetchError, match=r"need 6 MiB, and .* has 5 MiB free"):
        machine.download(tmp_path / "part")
    assert machine.offsets == []


# --- unpacking -------------------------------------------------------------------------------------------------------


def test_output_is_unpacked_once_counted_and_replaces_what_was_there(run: Run) -> None:
    old = run.folder / "output" / "rank-1"
    old.mkdir(parents=True)
    (old / "stale").touch()
    members = ("output", None), ("output/rank-1", None), ("output/rank-1/a", b"123"), ("output/rank-1/b", b"45")
    machine = Machine(pack(*members, links=(("output/rank-1/c", "a", tarfile.SYMTYPE),)))
    assert fetch(run, machine) == (2, 5)
    assert sorted(path.name for path in old.iterdir()) == ["a", "b", "c"]
    assert (old / "a").read_bytes() == b"123"
    asked = len(machine.offsets)
    assert fetch(run, machine) == (2, 5)  # remembered, also by another client
    assert len(machine.offsets) == asked
    assert not list((run.folder).rglob("*.tar"))
    assert not list((run.folder).rglob("*.unpacked"))


def test_a_machine_that_packed_nothing_brings_nothing(run: Run) -> None:
    for report in (NodeReport(), NodeReport(None, {"archive": None, "logs": {}, "problem": "no room"})):
        assert fetch_archive(Machine(b""), "/place", report, 0, run) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("has_filters", [True, False])
def test_nothing_is_written_but_results(run: Run, monkeypatch: pytest.MonkeyPatch, has_filters: bool) -> None:
    if not has_filters:  # as in Python 3.11.0 to 3.11.3
        for name in ("data_filter", "FilterError"):
            monkeypatch.delattr(tarfile, name, raising=False)
    members = (
        ("output", None),
        ("output/rank-0", None),
        ("output/rank-0/a", b"x"),
        ("output/rank-0/../../../escaped", b"x"),
        ("output/other", b"x"),
        ("../escaped", b"x"),
        ("run.json", b"x"),
        ("result.json", b"x"),
    )
    before = (run.folder / "run.json").exists()
    links = (
        ("output/rank-0/out", "../../../..", tarfile.SYMTYPE),
        ("output/rank-0/hard", "/etc/passwd", tarfile.LNKTYPE),
        ("output/rank-0/pipe", "", tarfile.FIFOTYPE),
        ("output/rank-0/device", "", tarfile.CHRTYPE),
    )
    assert fetch(run, Machine(pack(*members, links=links))) == (1, 1)
    assert (run.folder / "run.json").exists() is before
    assert not (run.folder / "result.json").exists()
    assert not list(run.folder.parent.rglob("escaped"))
    assert [path.name for path in (run.folder / "output").iterdir()] == ["rank-0"]
    (kept,) = (run.folder / "output" / "rank-0").iterdir()
    assert (kept.name, kept.stat().st_mode & 0o7022) == ("a", 0)


@pytest.mark.parametrize(("node", "kept"), [(0, True), (1, False)])
def test_faults_are_those_that_the_first_machine_has_written(run: Run, node: int, kept: bool) -> None:
    assert fetch(run, Machine(pack((FAULTS, b"{}\n"))), node) == (0, 0)
    assert (run.folder / FAULTS).exists() is kept


# --- samples and logs ------------------------------------------------------------------------------------------------


def test_samples_of_all_machines_are_in_the_order_of_their_times(run: Run) -> None:
    lines = {0: ['{"time": 1.0, "rank": 0}', '{"time": 3.0, "rank": 0}'], 1: ['{"time": 2.0, "rank": 1}', '{"ti']}
    for node, rows in lines.items():
        fetch(run, Machine(pack(("resources.jsonl", "\n".join([*rows, "5", '{"time": null}']).encode()))), node)
    merge_resources(run, 3)  # the third one has sent none
    merged = (run.folder / "resources.jsonl").read_text().splitlines()
    assert [json.loads(line)["time"] for line in merged] == [1.0, 2.0, 3.0]
    assert [json.loads(line)["rank"] for line in merged] == [0, 1, 0]


def report_of(*ranks: int, **logs: bytes) -> NodeReport:
    """The report of a machine with these ranks; `logs` are rank_N=content as it was packed there."""
    facts = {
        name.removeprefix("rank_"): {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        for name, text in logs.items()
    }
    return NodeReport({"ranks": [{"rank": rank} for rank in ranks]}, {"archive": None, "logs": facts, "problem": None})


@pytest.mark.parametrize(
    ("here", "packed", "wrong"),
    [
        (b"line\n", b"line\n", []),
        (b"", b"", []),
        (None, b"", []),
        (b"line\n", b"line\nmore\n", [0]),
        (b"line\nmore\n", b"line\n", [0]),
        (b"line\n", b"like\n", [0]),
        (b"line\n", b"", [0]),
        (None, b"line\n", [0]),
    ],
)
def test_a_log_is_wrong_if_size_or_digest_differ(run: Run, here: bytes | None, packed: bytes, wrong: list[int]) -> None:
    path = run.folder / "logs" / "rank-0.log"
    path.unlink()
    if here is not None:
        path.write_bytes(here)
    assert check_logs(run, [report_of(0, rank_0=packed)]) == (wrong, [])


def test_logs_without_a_digest_are_a_finding_with_their_ranks(run: Run) -> None:
    known = (run.folder / "logs" / "rank-0.log").read_bytes()
    wrong, [finding] = check_logs(run, [report_of(0, rank_0=known), report_of(1), NodeReport()])
    assert wrong == []
    assert finding.code == LOG_GAP
    assert finding.evidence == {"ranks": [1]}
    assert "of ranks 1 are not verified" in finding.summary
    pending = NodeReport({"ranks": [{"rank": 1, "phase": "pending"}]}, {"archive": None, "logs": {}, "problem": None})
    assert check_logs(run, [pending]) == ([], [])  # it never ran
    _, [many] = check_logs(run, [report_of(*range(2, 40))])
    assert "20, 21 are not verified" in many.summary
    assert len(many.evidence["ranks"]) == 38
