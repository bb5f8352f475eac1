"""`mlbench certify`, through the command line and its archive: real processes of this machine stand for nodes."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.app import run
from mlbench_cli.certify.certificate import choose_peers, read_certificate
from mlbench_cli.certify.words import REASONS
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import load_catalog
from task_images.certify.node import inventory
from tests.contract import clients
from tests.contract.clients import answer
from tests.contract.engines.labs import install_commands
from tests.contract.local_runs import until
from tests.fakes.kube_api import Fault, KubeApi
from tests.unit.results.runs import new_run, observation_of, spec

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")
CHANGES = ("--set", "confirm_seconds=0", "--set", "rounds=1", "--set", "run.absent=15s")
TINY = ("run", "t", "4", "--task", "certify", "--preset", "tiny", "-c", "1", "--share-machine", "--yes", *CHANGES)


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """Clients that are ended with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def folder_of(home: Path, name: str) -> Path:
    store = Store(home)
    folders = [row.run.folder for row in store.runs() if row.run.name == name]
    store.close()
    assert folders, f"there is no run {name}"
    return folders[0]


def certificate(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return document


def log_has(home: Path, name: str, rank: int, word: str) -> bool:
    try:
        return word in (folder_of(home, name) / f"logs/rank-{rank}.log").read_text()
    except (OSError, AssertionError, MlbenchError):
        return False


@pytest.mark.slow
def test_an_archive_derives_its_certificate_again_and_edited_samples_are_refused(home: Path, capsys: Captured) -> None:
    assert run([*TINY]) == 0
    folder = folder_of(home, "t-4")
    found = certificate(folder)
    assert found["scope"]["not_tested"] == []
    assert found["scope"]["shares_machine"]
    assert not found["is_partial"]
    assert [node["node"] for node in found["nodes"]] == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert not any(node["state"] in ("failed", "missing", "not_tested") for node in found["nodes"])
    assert {"matmul.burst", "memory", "disk.write", "network"} <= found["fleet"].keys()
    assert {row["operation"] for row in found["delivers"]["collectives"]} == {
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    assert found["delivers"]["training"]["checkpoint_write_mbps"] > 0
    capsys.readouterr()
    assert run(["verify", str(folder)]) == 0
    write_and_sign(folder, found)

    # Rank 1 says that it computed half as fast; all checksums agree with that.
    edited = home / "edited"
    shutil.copytree(folder, edited, ignore=shutil.ignore_patterns(".state"))
    log = edited / "logs/rank-1.log"
    text = re.sub(r'"matmul.burst":([0-9.]+)', lambda match: f'"matmul.burst":{float(match[1]) / 2}', log.read_text())
    log.write_text(text)
    sums = (edited / "SHA256SUMS").read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    (edited / "SHA256SUMS").write_text(re.sub(r"[0-9a-f]{64}(?=  logs/rank-1.log)", digest, sums))
    capsys.readouterr()
    assert run(["verify", str(edited)]) != 0
    assert "certificate.json" in capsys.readouterr().out


def write_and_sign(folder: Path, found: dict[str, Any]) -> None:
    """The files of a certificate: all of what the archive tells, a page without scripts, and an archive of its own."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], check=True)
    assert run(["certify", "--from", str(folder), "--to", "first", "--sign", "key"]) in (0, 9)  # if it is busy
    assert {**certificate(Path("first")), "schema_version": 1} == found
    assert {path.name for path in Path("first").iterdir()} == {
        *("archive.zip", "certificate.html", "certificate.json", "findings.jsonl", "nodes.csv"),
        *("passing.txt", "failing.txt"),
    }
    assert not re.search(r"\sstyle=|<script", Path("first/certificate.html").read_text())
    Path("signers").write_text(f"me@example.org {Path('key.pub').read_text()}")
    assert run(["verify", "first/archive.zip", "--signers", "signers"]) == 0


@pytest.mark.nightly  # by day, engines/test_contract.py has a node that never starts
def test_a_node_that_stops_answering_is_named_and_the_others_are_measured(
    home: Path, started: list["subprocess.Popen[str]"]
) -> None:
    client = clients.start(*TINY, "--set", "limit_seconds=30", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    started.append(client)
    until(lambda: log_has(home, "t-4", 2, '"kind":"rates"'))
    state = json.loads((folder_of(home, "t-4") / ".state/state.json").read_text())
    os.kill(next(rank["pid"] for rank in state["ranks"] if rank["rank"] == 2), signal.SIGSTOP)
    client.communicate(timeout=280)
    found = certificate(folder_of(home, "t-4"))
    bad = {node["node"]: node["reasons"][0] for node in found["nodes"] if node["state"] == "failed"}
    assert bad == {"worker-2": "no_answer"}
    assert "worker-2" not in found["delivers"]["nodes"]  # nor others, if a busy machine made them suspects
    assert run(["verify", "t-4"]) == 0


@pytest.mark.slow
def test_ctrl_c_leaves_a_certificate_that_is_marked_partial(
    home: Path, tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    words = ("certify", "local", "--nodes", "2", "--to", "cut", "-o", "json")
    client = clients.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    started.append(client)
    until(lambda: log_has(home, "certify-local-2", 1, '"kind":"rates"'))
    client.send_signal(signal.SIGINT)
    printed, _ = client.communicate(timeout=200)
    assert client.returncode == 130
    document = json.loads(printed)  # one, with the verdict so far and what stopped it
    assert (document["verdict"], document["error"]["code"]) == ("cannot_tell", "interrupted")
    found = certificate(tmp_path / "cut")
    assert found["is_partial"]
    assert found["verdict"] == "cannot_tell"
    assert "Partial. Cannot tell" in (tmp_path / "cut/certificate.html").read_text()


@pytest.mark.slow
def test_a_recheck_measures_the_suspect_beside_healthy_nodes_of_the_earlier_certificate(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    names = [f"m{number}" for number in range(4)]
    hosts = [{"name": name, "login": name, "slots": 8, "address": "127.0.0.1", "interface": "lo"} for name in names]
    details = {"folder": "~/far", "python": sys.executable, "hosts": hosts}
    Store().record_cluster(Cluster("lab", "hosts", details=details))
    seal_earlier(tmp_path / "t", names)
    assert run(["certify", "--from", "t", "--to", "first"]) == 9
    again = ["certify", "lab", "--like", "first/archive.zip", "--only", "drift", "--yes"]
    assert run([*again, "--recheck", "m9"]) == 2
    assert "no node m9" in capsys.readouterr().err
    assert run([*again, "--recheck", "m1", "--to", "second"]) == 9
    printed = capsys.readouterr()
    assert "Plan for 4 nodes of lab, level quick" in printed.err
    assert "m1 is not tested" in printed.out
    found = json.loads(Path("second/certificate.json").read_text())
    assert [node["node"] for node in found["nodes"]] == ["m0", "m2", "m3", "m1"]
    linked = json.loads(Path("second/changes.json").read_text())
    assert [(row["node"], row["now"]) for row in linked["changes"]] == [(f"m{n}", "not_tested") for n in range(4)]
    with Archive.open(Path("second/archive.zip")) as archive:
        assert archive.run["spec"]["parameters"]["earlier"] == linked["earlier"]


def test_a_node_without_a_name_is_missing_and_the_others_keep_theirs(capsys: Captured) -> None:
    seal_earlier(Path("t"), ["m0", "m1", None, "m3"])
    Path("first").mkdir()
    Path("first/changes.json").write_text("of another certificate")
    assert run(["certify", "--from", "t", "--to", "first"]) == 7
    printed = capsys.readouterr()
    found = certificate(Path("first"))
    assert [node["node"] for node in found["nodes"]] == ["m0", "m1", "worker-2", "m3"]
    assert Path("first/failing.txt").read_text() == "worker-2\n"
    assert "worker-2 never started" in Path("first/ticket.txt").read_text()
    assert "For you to run" not in printed.err  # no command knows a node of this name
    assert not Path("first/changes.json").exists()


def test_the_name_of_a_node_is_one_line_of_every_file() -> None:
    seal_earlier(Path("t"), ["m0\ntouch evil", "m1", None, "m3"])
    assert run(["certify", "--from", "t", "--to", "first"]) == 7
    assert not [path for path in Path("first").iterdir() if b"\ntouch evil" in path.read_bytes()]
    assert "m0 touch evil" in Path("first/nodes.csv").read_text()


def test_a_certificate_whose_evidence_contradicts_itself_names_nobody(capsys: Captured) -> None:
    seal_earlier(Path("t"), ["m0", "m1", None, "m3"], end=1000.0)  # of a run of 3 s
    assert run(["certify", "--from", "t", "--to", "first"]) == 9
    printed = capsys.readouterr()
    assert "Cannot tell: the evidence contradicts itself: samples were taken until 1000 s after" in printed.out
    assert Path("first/failing.txt").read_text() == ""
    assert not Path("first/ticket.txt").exists()
    with Archive.open(Path("first/archive.zip")) as archive:
        assert "implausible_samples" in [finding["code"] for finding in archive.findings]


def test_files_beside_the_archive_that_say_something_else_are_found(capsys: Captured) -> None:
    seal_earlier(Path("t"), ["m0", "m1", None, "m3"])
    assert run(["certify", "--from", "t", "--to", "first"]) == 7
    assert run(["verify", "first/archive.zip"]) == 0
    Path("first/nodes.csv").unlink()
    assert run(["verify", "first"]) == 0  # nobody needs all of them
    for name in ("certificate.json", "findings.jsonl", "passing.txt", "failing.txt", "ticket.txt"):
        Path("first", name).write_text("worker-2\n" if name == "passing.txt" else "")
    (found,) = answer(capsys, "verify", "first/archive.zip", code=2)["archives"]
    edited = ["certificate.json", "failing.txt", "findings.jsonl", "passing.txt", "ticket.txt"]
    assert sorted(problem["file"] for problem in found["problems"]) == edited
    assert run(["certify", "--from", "first/archive.zip", "--to", "first"]) == 7
    assert run(["verify", "first/archive.zip"]) == 0


def test_a_node_with_other_gpus_was_replaced_and_the_vendor_gets_their_serial_numbers() -> None:
    seal_earlier(Path("t"), ["m0", "m1", "m2", "m3"], serials=["0", "1", "2", "3"])
    seal_earlier(Path("u"), ["m0", "m1", "m2", "m3"], serials=["0", "9", "2", "3"])
    assert run(["certify", "--from", "t", "--to", "first"]) == 9
    assert run(["certify", "--from", "u", "--to", "second", "--like", "first/archive.zip"]) == 9
    changes = json.loads(Path("second/changes.json").read_text())["changes"]
    assert [(row["node"], row["change"]) for row in changes] == [("m1", "replaced")]
    seal_earlier(Path("w"), ["m0", "m1", "m2", "m3"])  # which cannot tell its serial numbers
    assert run(["certify", "--from", "w", "--to", "fourth", "--like", "first/archive.zip"]) == 9
    assert json.loads(Path("fourth/changes.json").read_text())["changes"] == []
    seal_earlier(Path("v"), ["m0", "m1", "m2", None], serials=["0", "1", "2", "3"], error="no GPU")
    assert run(["certify", "--from", "v", "--to", "third"]) == 7
    assert "m1: serial numbers of its GPUs: 1\n" in Path("third/ticket.txt").read_text()


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.9, "memory: 10.0 % slower than before (11 of 11 nodes by more than the margin)."),
        (1.1, "memory: 10.0 % faster than before (11 of 11 nodes by more than the margin)."),
        (0.99, "no node has changed its state."),
        (1.01, "no node has changed its state."),
    ],
)
def test_a_fleet_that_has_become_slower_as_a_whole_is_told(capsys: Captured, share: float, said: str) -> None:
    """No node stands out, so its peers cannot tell; and one that is to be returned tells nothing of the others."""
    names = [f"m{number}" for number in range(12)]
    rates = [5.0 + number / 100 for number in range(12)]
    failed = [{"kind": "rates", "at": 1.5, "round": number, "errors": {"memory": "no time"}} for number in (1, 2, 3)]
    more = "\n".join(f"certify {json.dumps(line)}" for line in failed)
    seal_earlier(Path("t"), names, rates=rates, more=more)
    seal_earlier(Path("u"), names, rates=[share * rate for rate in rates], more=more)
    run(["certify", "--from", "t", "--to", "first"])
    run(["certify", "--from", "u", "--to", "second", "--like", "first/archive.zip"])
    assert said in " ".join(capsys.readouterr().err.split())
    is_within = 0.98 < share < 1.02
    assert said.removesuffix(".") in Path("second/certificate.html").read_text() or is_within
    found = json.loads(Path("second/changes.json").read_text())
    assert found["changes"] == []
    assert [(row["test"], row["nodes"], row["of"]) for row in found["fleet"]] == [("memory", 11, 11)] * (not is_within)


def test_a_node_to_watch_passes_and_nobody_is_measured_beside_it() -> None:
    names = [f"m{number}" for number in range(12)]
    failed = {"kind": "rates", "at": 1.5, "round": 1, "errors": {"memory": "no time"}}
    seal_earlier(Path("t"), names, more=f"certify {json.dumps(failed)}")
    assert run(["certify", "--from", "t", "--to", "first"]) == 9
    assert certificate(Path("first"))["nodes"][0]["state"] == "watch"
    assert Path("first/passing.txt").read_text().split() == names
    peers = choose_peers(read_certificate(Path("first/archive.zip")), "m1")
    assert not {"m0", "m1"} & {*peers}


@pytest.mark.parametrize(("end", "code"), [(2.0, 0), (None, 9)])
def test_a_recheck_that_was_stopped_clears_nobody(capsys: Captured, end: float | None, code: int) -> None:
    seal_earlier(Path("t"), ["m0", "m1", "m2", "m3"], end, recheck="m1")
    assert run(["certify", "--from", "t", "--to", "first"]) == code
    assert ("Partial. m1 is ok" in capsys.readouterr().out) is (end is None)
    assert "recheck m1" not in Path("first/certificate.html").read_text()  # which is no other level


def test_every_reason_is_explained_to_the_buyer() -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/certify.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {reason for row in rows for reason in re.findall(r"`([a-z_]+)", row)} == {*REASONS}


def seal_earlier(
    folder: Path,
    names: Sequence[str | None],
    end: float | None = 2.0,
    serials: Sequence[str] = (),
    error: str | None = None,
    rates: Sequence[float] = (),
    more: str = "",
    recheck: str = "",
) -> None:
    """An archive in which all nodes of the cluster "lab", which are this machine, have measured the same, or `rates`,
    but for those without a name, which never started. Samples end after `end` seconds. `serials` of GPUs, which have an
    `error`. `more`: a line of rank 0."""
    shared = {"cluster": "lab", "engine": "hosts", "cluster_kind": "hosts", "preset": "tiny"}
    parameters = load_catalog()["certify"].resolve("tiny", {"stages": "drift", "recheck": recheck})
    logs = {}
    for rank in (rank for rank, name in enumerate(names) if name is not None):
        said = {"kind": "inventory", "keys": inventory({}, {}), "error": error}
        logs[rank] = [f"certify {json.dumps({**said, 'serial': serials[rank] if serials else None})}"]
        values = {"memory": rates[rank] if rates else 5.0}
        logs[rank].append(f"certify {json.dumps({'kind': 'rates', 'at': 1.0, 'round': 0, 'values': values})}")
    logs[0] = ['certify {"kind":"scope","turns":true,"clocks":{}}', *logs[0], more]
    logs[0] += [] if end is None else [f'certify {{"kind":"end","at":{end}}}']
    made = new_run(folder, spec("t-4", len(names), task="certify", parameters=parameters, **shared), logs)
    write_run_document(made)
    seen = observation_of(len(names), 3.0)
    workers = (replace(worker, node=name) for worker, name in zip(seen.workers, names, strict=True))
    absent = {"phase": "pending", "started": None, "finished": None, "exit_code": None}
    workers = (replace(worker, **absent) if worker.node is None else worker for worker in workers)
    seal(made, replace(seen, workers=tuple(workers), seconds=3.0))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Which cluster is to be accepted?"),
        (["nowhere"], "nowhere"),
        (["--from", "nothing"], "nothing"),
        (["local", "--level", "deep"], 'There is no level "deep".'),
        (["local", "--only", "gpu"], 'There is no stage "gpu".'),
        (["local", "--nodes", "1"], "A certificate needs at least 2 nodes"),
        (["local", "--hours", "2"], "Only the stage soak, of --level soak, repeats"),
        (["local", "--only", "soak"], "Only the stage soak, of --level soak, repeats"),
        (["local", "--budget", "20s"], "A budget of 20 s is too small: with the stage node"),
        (["local", "--budget", "soon"], '--budget "soon" is not a duration'),
        (["local", "--expect", "low.yaml"], "figure 1: value is 300. Allowed: at least 366 GB/s, 75 % of the 488 GB/s"),
        (["local", "--expect", "odd.yaml"], "figure 1: operation is 'broadcast'. Allowed: all_reduce, all_gather"),
        (["local", "--expect", "two.yaml"], "figures for 2 nodes, and 4 are to be measured"),
        (["local", "--expect", "absent.yaml"], "There is no file absent.yaml."),
        (["local", "--like", "absent.zip"], "There is no archive absent.zip."),
        (["local", "--to", "low.yaml/folder"], "low.yaml is no folder."),
        (["local", "--sign", "absent"], "There is no key absent."),
        (["local", "--recheck", "n1"], "--recheck needs the certificate in which the node was a suspect."),
    ],
)
def test_bad_input_is_refused_before_anything_starts(capsys: Captured, words: list[str], said: str) -> None:
    row = "- {machine: H100, fabric: EFA, nodes: 2, bytes: 17179869184, source: me, "
    Path("low.yaml").write_text(f"{row} operation: all_reduce, value: 300}}\n")
    Path("odd.yaml").write_text(f"{row} operation: broadcast, value: 300}}\n")
    Path("two.yaml").write_text(f"{row} operation: all_reduce, value: 480}}\n")
    assert run(["certify", *words]) in (2, 4)
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert run(["status"]) == 0
    assert "certify" not in capsys.readouterr().out


def test_what_a_cluster_needs_of_a_run_is_given_as_for_any_run(home: Path, capsys: Captured) -> None:
    with KubeApi() as server:
        home.mkdir()
        server.record(home)
        server.faults.append(Fault("POST .*/jobs", status=403, message="no more Jobs today"))
        words = ("--image", "mine/torch:1", "--start-timeout", "2h", "--node-selector", "pool=gpu")
        assert run(["certify", "there", "--nodes", "2", "--yes", *words]) == 3
    assert "no more Jobs today" in capsys.readouterr().err
    spec = json.loads((folder_of(home, "certify-there-2") / "run.json").read_text())["spec"]
    assert spec["image"] == "mine/torch:1"
    assert spec["kubernetes"]["start_timeout"] == 7200
    assert spec["kubernetes"]["node_selector"] == {"pool": "gpu"}
    assert run(["certify", "local", "--start-timeout", "2h"]) == 2
