"""What is taken out of evidence line by line: names of hosts and homes, packages and paths, and what stays."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CannotTellError, DamagedArchive
from mlbench_cli.model.run import Ending
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.anonymous import KEPT_PACKAGES, anonymize
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.results.archive.pack import pack, unpack
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.reseal import seal_anew, seal_partial
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.storage.run_folder import RunFolder
from tests.unit.results.runs import START, event, new_run, observation_of, sealed_run, spec, training_log

ROOT = "/root"  # the home of every Linux machine's superuser


def run_folder(folder: Path, *lines: str | bytes, hosts: tuple[str, ...] = ("alpha", "beta"), **changes: Any) -> Path:
    """The evidence of a run on `hosts`, whose rank 0 has written these lines; not sealed."""
    run = new_run(folder, spec(**changes), {})
    write_run_document(run, {"mlbench": "4", "python": "3", "command_line": ["mlbench"], "packages": {"torch": "2"}})
    seen = observation_of(len(hosts)).to_dict()
    for worker, host in zip(seen["workers"], hosts, strict=True):
        worker["node"] = host
    (folder / "observation.json").write_text(json.dumps(seen))
    texts = (line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines)
    (folder / "logs" / "rank-0.log").write_bytes(b"".join(texts))
    return folder


def clean(folder: Path, *lines: str | bytes, **changes: Any) -> list[str]:
    """The log of rank 0 after anonymizing."""
    anonymize(run_folder(folder / "run", *lines, **changes))
    return (folder / "run" / "logs" / "rank-0.log").read_text().splitlines()


@pytest.mark.parametrize(
    ("line", "cleaned"),
    [
        ("on alpha and beta", "on node-0 and node-1"),
        ("alpha:29500", "node-0:29500"),
        ("(alpha)", "(node-0)"),
        ("alpha.example.org", "node-0.example.org"),
        ("alphabet", "alphabet"),  # another word
        ("my-alpha", "my-alpha"),
        ("x.alpha", "x.alpha"),
        ("alpha-2", "alpha-2"),
        ("alpha2", "alpha2"),
        ("/home/jane/x", "/home/user/x"),
        ("'/home/jane'", "'/home/user'"),
        ("/Users/jane/x", "/home/user/x"),
        (f"{ROOT}/x", "/home/user/x"),
        (ROOT, ROOT),
        ("/rooted/x", "/rooted/x"),
        ("/home/", "/home/"),
        ("/home/jane and /home/joe/y", "/home/user and /home/user/y"),
    ],
)
def test_names_of_machines_and_of_homes_are_replaced_as_whole_words(tmp_path: Path, line: str, cleaned: str) -> None:
    assert clean(tmp_path, line) == [cleaned]


def test_the_longest_name_counts_and_each_machine_keeps_its_number(tmp_path: Path) -> None:
    hosts = ("gpu", "gpu.lab", "gpu")
    assert clean(tmp_path, "gpu.lab gpu", hosts=hosts, workers=3) == ["node-1 node-0"]
    seen = json.loads((tmp_path / "run" / "observation.json").read_text())
    assert [worker["node"] for worker in seen["workers"]] == ["node-0", "node-1", "node-0"]


def test_machines_that_only_the_ranks_know_are_replaced_too(tmp_path: Path) -> None:
    lines = clean(tmp_path, "first gamma", event("environment", host="gamma", python="3"), "alpha gamma")
    assert (lines[0], lines[2]) == ("first node-2", "node-0 node-2")
    assert json.loads(lines[1].partition(" ")[2])["host"] == "node-2"


def test_packages_that_only_tell_of_the_author_leave_the_environment(tmp_path: Path) -> None:
    packages = {"torch": "2", "secret-project": "1"}
    told, other = event("environment", packages=packages), event("metric", name="x", value=1, packages=packages)
    lines = [json.loads(line.partition(" ")[2]) for line in clean(tmp_path, told, other)]
    assert [line["packages"] for line in lines] == [{"torch": "2"}, packages]


def test_without_names_of_machines_only_homes_are_replaced(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "alpha /home/jane/x")
    (folder / "observation.json").unlink()
    anonymize(folder)
    assert (folder / "logs" / "rank-0.log").read_text() == "alpha /home/user/x\n"


@pytest.mark.parametrize(
    "line",
    [
        event("metric", name="loss", value=0.5),
        event("metric", name="loss", value=0.5).replace(": ", ":"),
        "@mlbench {nonsense",
        "no trace",
    ],
)
def test_a_line_without_a_trace_keeps_every_byte(tmp_path: Path, line: str) -> None:
    assert clean(tmp_path, line) == [line]


def test_bytes_that_are_no_text_are_kept(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", b"alpha \xff\n", b"alpha")
    anonymize(folder)
    assert (folder / "logs" / "rank-0.log").read_bytes() == b"alpha \xff\nnode-0"


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        *((name, True) for name in ("torch", "torchvision", "triton", "numpy", "scipy", "scikit-learn", "pillow")),
        *((name, True) for name in ("mpi4py", "openmpi", "tensorflow-cpu", "jaxlib", "nvidia-nccl-cu13", "mkl")),
        *((name, True) for name in ("mlbench-cli", "cuda-toolkit", "intel-openmp", "oneccl-bind-pt", "keras")),
        *((name, False) for name in ("torchaudio", "my-torch", "numpy-secret", "requests", "kerasx", "nvidia", "")),
    ],
)
def test_packages_that_compute_or_communicate_stay(name: str, is_kept: bool) -> None:
    assert (KEPT_PACKAGES.fullmatch(name) is not None) is is_kept


def test_the_record_of_a_run_keeps_what_was_measured(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "x", data_dir="/home/jane/sets")
    before = json.loads((folder / "run.json").read_text())
    before["provenance"] |= {"packages": {"torch": "2", "secret": "1"}, "machine": {"cpu": "X on alpha"}}
    (folder / "run.json").write_text(json.dumps(before))
    anonymize(folder)
    after = json.loads((folder / "run.json").read_text())
    expected = {**before["spec"], "data_dir": "data"}
    assert after["spec"] == expected
    assert after["spec_hash"] == RunSpec.from_dict(expected).hash != before["spec_hash"]
    assert after["provenance"] == {
        "mlbench": "4",
        "python": "3",
        "command_line": [],
        "packages": {"torch": "2"},
        "machine": {"cpu": "X on node-0"},
    }
    assert {key for key in after if after[key] != before[key]} == {"spec", "spec_hash", "provenance"}


def test_a_record_without_provenance_or_data_folder_stays(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "x")
    document = {**json.loads((folder / "run.json").read_text()), "provenance": None}
    (folder / "run.json").write_text(json.dumps(document))
    anonymize(folder)
    assert json.loads((folder / "run.json").read_text()) == document


def test_files_of_the_task_and_of_the_engine_are_cleaned_in_all_folders(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "x")
    (folder / "output" / "rank-0" / "deep").mkdir(parents=True)
    (folder / "output" / "rank-0" / "deep" / "a.txt").write_text("alpha\n/home/jane/x\n")
    (folder / "manifests").mkdir()
    (folder / "manifests" / "pod.yaml").write_text("node: beta\npath: /opt/acme/python\n")
    (folder / "manifests" / "plan.json").write_text('"/opt/acme/python" /usr/bin/x /dev/null $HOME/a/b "alpha"\n')
    (folder / "shaping.json").write_text('{"method": "alpha", "n": 1}')
    anonymize(folder)
    assert (folder / "output" / "rank-0" / "deep" / "a.txt").read_text() == "node-0\n/home/user/x\n"
    assert (folder / "manifests" / "pod.yaml").read_text() == "node: node-1\npath: /opt/acme/python\n"
    assert (folder / "manifests" / "plan.json").read_text() == '"python" /usr/bin/x /dev/null $HOME/a/b "node-0"\n'
    assert json.loads((folder / "shaping.json").read_text()) == {"method": "node-0", "n": 1}


@pytest.mark.parametrize(
    ("size", "moved"),
    [
        (0, 0),
        (3, 3),
        (6, 6),  # "plain\n" ends here
        (7, 7),  # within the line that changes: as far as it got
        (11, 11),
        (12, 13),  # "alpha\n" has become "node-0\n"
        (14, 15),
        (30, 31),
    ],
)
def test_a_size_of_a_log_moves_with_its_lines(tmp_path: Path, size: int, moved: int) -> None:
    folder = run_folder(tmp_path / "run", "plain", "alpha", "more lines")
    rows: list[dict[str, Any]] = [
        {"time": START, "rank": 0, "log_bytes": size},
        {"time": START, "rank": 1, "log_bytes": size},
    ]
    rows.append({"time": START, "rank": "0", "log_bytes": size, "pod": "alpha"})
    (folder / "resources.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    anonymize(folder)
    found = [json.loads(line) for line in (folder / "resources.jsonl").read_text().splitlines()]
    assert [row["log_bytes"] for row in found] == [moved, size, size]
    assert found[2]["pod"] == "node-0"


@pytest.mark.parametrize(
    ("size", "moved"), [(5, 5), (6, 6), (11, 11), (12, 12), (13, 13), (24, 13), (26, 13), (27, 14)]
)
def test_a_size_within_a_line_that_got_shorter_is_at_most_its_end(tmp_path: Path, size: int, moved: int) -> None:
    """The line of 20 bytes after the first 6 becomes one of 7."""
    folder = run_folder(tmp_path / "run", "plain", "a-very-long-machine", "more", hosts=("a-very-long-machine", "b"))
    (folder / "resources.jsonl").write_text(json.dumps({"time": START, "rank": 0, "log_bytes": size}) + "\n")
    anonymize(folder)
    assert json.loads((folder / "resources.jsonl").read_text())["log_bytes"] == moved
    assert (folder / "logs" / "rank-0.log").read_text() == "plain\nnode-0\nmore\n"


# --- sealing again ----------------------------------------------------------------------------------------------------


def test_a_partial_archive_is_sealed_beside_the_run_that_goes_on(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", spec(), {rank: training_log(rank)[:-1] for rank in (0, 1)})
    write_run_document(run)
    (run.folder / ".state").mkdir()
    (run.folder / ".state" / "secret").write_text("x")
    target = tmp_path / "part.zip"
    seal_partial(run, observation_of(exit_codes=[None, None], ended=None), target)
    assert verify(target).ok
    with Archive.open(target) as archive:
        assert archive.result["outcome"] == "cancelled"
        assert archive.result["summary"].startswith(
            "demo-2 had not ended. This archive was written during the run and is incomplete."
        )
        (first, *_) = archive.findings
        assert (first["code"], first["hint"]) == ("still_running", "Download it again after the run has ended.")
        assert not [name for name in archive.names if "secret" in name]
    assert not RunFolder(run.folder).is_sealed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.zip", "run"]


def test_changed_evidence_is_judged_again(tmp_path: Path) -> None:
    source, target = sealed_run(tmp_path / "run"), tmp_path / "new.zip"
    (source / "SHA256SUMS.sig").write_text("signature of the original")

    def fail(folder: Path) -> None:
        document = json.loads((folder / "observation.json").read_text())
        document |= {"ended": str(Ending.CANCELLED)}
        (folder / "observation.json").write_text(json.dumps(document))
        assert not (folder / "result.json").exists()
        assert not (folder / "SHA256SUMS.sig").exists()

    with Archive.open(source) as archive:
        seal_anew(archive, target, fail)
    with Archive.open(target) as archive:
        assert archive.result["outcome"] == "cancelled"
    assert verify(target).ok
    assert Archive.open(source).result["outcome"] == "goal_reached"


def test_evidence_that_cannot_be_judged_is_not_sealed(tmp_path: Path) -> None:
    source = sealed_run(tmp_path / "run")
    target = tmp_path / "new.zip"

    def break_shaping(folder: Path) -> None:
        (folder / "shaping.json").write_text("{}")

    with Archive.open(source) as archive:
        with pytest.raises(CannotTellError, match="run-2 has no observation of its workers"):
            seal_anew(archive, target, lambda folder: (folder / "observation.json").unlink())
        with pytest.raises(CannotTellError, match=r"The evidence of .*run cannot be sealed again: "):
            seal_anew(archive, target, break_shaping)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_zip_that_was_damaged_leaves_no_folder_behind(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    pack(folder, tmp_path / "a.zip")
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[-30] ^= 1
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(DamagedArchive):
        unpack(tmp_path / "a.zip", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "run"]
