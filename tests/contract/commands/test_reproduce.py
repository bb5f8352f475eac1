"""`mlbench reproduce`: real runs again, receipts that are derived again, and nothing of a stranger's executed."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import api
from mlbench_cli.api import remote_archives
from mlbench_cli.app import run
from mlbench_cli.engines.placement import HostRecord
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.stats import Verdict
from mlbench_cli.storage.store import Store
from tests.contract.clients import answer
from tests.contract.commands.test_foreign_runs import digits, strangers_archive
from tests.contract.engines.labs import install_commands
from tests.contract.terminal import Terminal
from tests.fakes.file_server import serving_folder
from tests.unit.results.runs import sealed_repeats, sealed_run

Captured = pytest.CaptureFixture[str]
GOOD = (10.0, 10.2, 9.9)
SLOW = (14.5, 14.7, 14.4)


@pytest.fixture(autouse=True)
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home.parent


def with_all(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--with", name)]


def read(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text())
    return document


# --- real runs -----------------------------------------------------------------------------------------------------


def test_a_result_is_run_again_judged_and_its_receipt_derived(capsys: Captured) -> None:
    assert run(["run", "x", "1", "--command", "sleep 1", "--repeat", "2"]) == 0
    code = run(["reproduce", "x", "--within", "90%", "--repeat", "3", "-o", "json"])
    out, err = capsys.readouterr()
    document = json.loads(out[out.index("{") :])
    assert code == Verdict(document["verdict"]).exit_code
    assert "3 runs" in err
    names = [row.run.name for row in Store().runs()]
    assert sorted(names) == ["x-1-r1", "x-1-r2", "x-repro-1-r1", "x-repro-1-r2", "x-repro-1-r3"]
    assert [entry["name"] for entry in document["original"]] == ["x-1-r1", "x-1-r2"]
    (figure,) = document["figures"]
    assert (len(figure["original"]), len(figure["reproduction"])) == (2, 3)
    assert all(value > 0.9 for value in figure["reproduction"])  # it did run
    folders = [str(row.run.folder) for row in Store().runs()]
    assert run(["verify", "x-repro.json", *folders]) == 0
    assert "ok (derivation); it says:" in capsys.readouterr().out
    assert run(["reproduce", "x", "--within", "90%", "--repeat", "3"]) == code  # resumed: nothing is left to run
    assert len(Store().runs()) == 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_ranks")
def test_a_training_from_the_web_is_repeated_from_its_archive_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    words = ["run", "t", "1", "--task", "digits_resnet", "--preset", "tiny", "--set", "goal_full=30"]
    assert run(words) == 0
    assert run(["download", "t-1", "--to", "served/t-1.zip"]) == 0
    monkeypatch.setenv("MLBENCH_HOME", str(folder / "elsewhere"))
    with serving_folder(folder / "served") as address:
        code = run(["reproduce", f"{address}/t-1.zip", "--repeat", "2", "--within", "95%", "--receipt", "r.json"])
        assert run(["reproduce", f"{address}/gone.zip"]) == 4
    receipt = read("r.json")
    assert code == Verdict(receipt["verdict"]).exit_code
    assert [entry["name"] for entry in receipt["reproduction"]] == ["t-repro-1-r1", "t-repro-1-r2"]
    assert {row.run.spec.task for row in Store().runs()} == {"digits_resnet"}
    assert sorted(row.run.spec.seed for row in Store().runs()) == [42, 43]
    assert "the server answers 404" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_training_is_repeated_on_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["run", "t", "1", "--task", "digits_resnet", "--preset", "tiny"]) == 0
    for name, value in install_commands(folder / "commands").items():
        monkeypatch.setenv(name, value)
    hosts = [HostRecord(name="m0", login="m0", slots=1, address="127.0.0.1", interface="lo")]
    details = {"hosts": hosts, "folder": str(folder / "far"), "python": sys.executable}
    Store().record_cluster(Cluster("lab", "hosts", details=details))
    code = run(["reproduce", "t-1", "--cluster", "lab", "--repeat", "2", "--within", "95%", "--receipt", "r.json"])
    receipt = read("r.json")
    assert code == Verdict(receipt["verdict"]).exit_code
    assert all(len(figure["reproduction"]) == 2 for figure in receipt["figures"])
    assert "kinds of cluster" in [each["name"] for each in receipt["not_the_same"] if each["matters"]]
    specs = [row.run.spec for row in Store().runs() if row.run.spec.cluster == "lab"]
    assert [(spec.engine, spec.cluster_kind) for spec in specs] == [("hosts", "hosts")] * 2


def test_a_plan_is_printed_and_nothing_run(folder: Path, capsys: Captured) -> None:
    archive = strangers_archive(folder, **digits(seed=7, data_dir="/of/theirs"))
    sealed = sealed_repeats(folder / "a", GOOD)
    failed = sealed_run(folder / "b", "failed", **digits())
    assert run(["reproduce", sealed[0], "--dry-run"]) == 2  # a task that nobody knows
    assert run(["reproduce", str(failed), "--dry-run"]) == 2
    assert "it has no result to reproduce" in capsys.readouterr().err
    plan = answer(capsys, "reproduce", archive, "--data-dir", str(folder), "--repeat", "2", "--dry-run")
    assert [(each["name"], each["seed"]) for each in plan["runs"]] == [("x-repro-1-r1", 7), ("x-repro-1-r2", 8)]
    assert not Store().runs()


# --- what is never run ---------------------------------------------------------------------------------------------


def test_a_strangers_command_is_never_run(folder: Path, capsys: Captured) -> None:
    archive = strangers_archive(folder)
    for words in ([], ["--repeat", "3"], ["--cluster", "local"]):
        assert run(["reproduce", archive, *words]) == 2
        error = capsys.readouterr().err
        assert "command: sh -c 'touch pwned'" in error
        assert "mlbench reproduce does not run commands chosen by the author of an archive" in error
    assert not Path("pwned").exists()
    assert not Store().runs()


def test_a_strangers_script_is_shown_and_runs_only_if_somebody_agrees(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """With the files of the archive, not those that stand here, and never because of --yes."""
    script = f"#!{sys.executable}\nimport sys, helper\nopen('ran', 'a').write(helper.WORD + sys.argv[1])\n"
    (folder / "train.py").write_text(script)
    (folder / "helper.py").write_text("WORD = 'theirs'\n")
    path = folder / "train.py"
    path.chmod(0o755)
    assert run(["run", "x", "1", "--command", f"{path} 7", "--repeat", "2"]) == 0
    assert run(["download", "x", "--to", "x.zip"]) == 0
    (folder / "ran").unlink()
    monkeypatch.setenv("MLBENCH_HOME", str(folder / "elsewhere"))
    here = folder / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    path.unlink()
    (here / "helper.py").write_text("WORD = 'ours'\n")
    words = ["reproduce", "../x.zip", "--repeat", "2", "--within", "95%"]
    capsys.readouterr()
    assert run([*words, "--yes"]) == 2
    said = capsys.readouterr().err
    assert "helper.WORD + sys.argv[1]" in said
    assert "-WORD = 'ours'" in said
    assert "+WORD = 'theirs'" in said
    assert "--run-foreign-command" in said
    assert not Store().runs()
    terminal = Terminal(*words, home=folder / "elsewhere", cwd=here)
    terminal.answer("Run this? [y/N] ", "n")
    assert terminal.finish()[0] == 130
    assert not Store().runs()
    code = run([*words, "--run-foreign-command"])
    assert code == Verdict(read("x-repro.json")["verdict"]).exit_code
    assert len(Store().runs()) == 2
    (ran,) = (folder / "elsewhere" / "fetched").glob("*-code/ran")
    assert ran.read_text() == "theirs7" * 2
    assert sorted(path.name for path in here.iterdir()) == ["helper.py", "x-repro.json"]


def test_a_cluster_that_is_not_this_machine_is_named_by_the_reader(folder: Path, capsys: Captured) -> None:
    archive = strangers_archive(folder, cluster="theirs", engine="kubernetes")
    assert run(["reproduce", archive]) == 2
    assert 'The original ran on the cluster "theirs"' in capsys.readouterr().err
    assert run(["reproduce", archive, "--cluster", "local"]) == 2
    assert "is not started on another cluster" in capsys.readouterr().err


# --- judging runs that are there -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "code"), [((10.1, 9.9, 10.15), 0), (SLOW, 7), ((11.0, 13.5, 10.2), 9)])
def test_finished_runs_are_judged(folder: Path, capsys: Captured, seconds: tuple[float, ...], code: int) -> None:
    first, again = sealed_repeats(folder / "a", GOOD), sealed_repeats(folder / "b", seconds)
    assert run(["reproduce", *first, *with_all(again)]) == code
    out = capsys.readouterr().out
    assert read("x-1-repro.json")["verdict"].replace("_", " ") in out.lower()
    assert "NOT THE SAME" in out
    assert run(["verify", "x-1-repro.json", *first, *again]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--within", "ten"], "is not between 0 and 100 %"),
        (["--within", "0"], "is not between 0 and 100 %"),
        (["--within", "100%"], "is not between 0 and 100 %"),
        (["--repeat", "1"], "neither auto nor a number"),
        (["--repeat", "many"], "neither auto nor a number"),
        (["--metric", "speed"], 'no figure "speed"'),
        (["--with", "x", "--repeat", "3"], "--with judges existing runs"),
    ],
)
def test_wrong_options_are_refused(folder: Path, capsys: Captured, words: list[str], message: str) -> None:
    assert run(["reproduce", *sealed_repeats(folder / "a", GOOD), *words]) == 2
    assert message in capsys.readouterr().err


# --- receipts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def receipt(folder: Path) -> list[str]:
    """The words of `verify` for a receipt and its archives."""
    first, again = sealed_repeats(folder / "a", GOOD), sealed_repeats(folder / "b", (10.1, 9.9, 10.15))
    assert run(["reproduce", *first, *with_all(again), "--receipt", "r.json"]) == 0
    return ["r.json", *first, *again]


def test_a_receipt_without_its_archives_is_not_derived(receipt: list[str], capsys: Captured) -> None:
    assert run(["verify", *receipt[:4]]) == 9
    assert "3 of the archives that it names were not passed" in capsys.readouterr().out
    (found,) = answer(capsys, "verify", "r.json", code=9)["receipts"]
    assert (found["ok"], len(found["missing"])) == (False, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict",), "different"),
        (("margin",), 0.01),
        (("reason",), "seconds: reproduced within 0.1 %"),
        (("figures", 0, "ratio"), 1.0),
        (("figures", 0, "original", 1), 9.0),
        (("not_the_same",), []),
        (("original", 0, "name"), "other"),
    ],
)
def test_an_edited_receipt_does_not_follow_from_its_archives(
    receipt: list[str], capsys: Captured, path: tuple[Any, ...], value: object
) -> None:
    document = read("r.json")
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    Path("r.json").write_text(json.dumps(document))
    assert run(["verify", *receipt]) == 2
    assert "it does not follow from its archives" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', "nonsense", '{"schema_version": 1}'])
def test_what_is_no_receipt_is_refused(text: str, capsys: Captured) -> None:
    Path("r.json").write_text(text)
    assert run(["verify", "r.json"]) == 2
    assert "r.json is not a receipt" in capsys.readouterr().err
    assert run(["verify", "gone.json"]) == 4


def test_a_receipt_is_signed_and_its_origin_verified(receipt: list[str], capsys: Captured) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], check=True)
    Path("signers").write_text(f"ada@example.org {Path('key.pub').read_text()}")
    verify = ["verify", *receipt[:1], "--signers", "signers"]
    assert run(verify) == 3
    assert "it has no signature" in capsys.readouterr().out
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", "key", "-n", "mlbench-archive", "r.json"], check=True)
    assert run(verify) == 3
    assert "another namespace than mlbench-receipt" in capsys.readouterr().out
    Path("r.json.sig").unlink()
    assert run(["verify", "r.json", "--sign", "key"]) == 0
    assert run(["verify", "r.json", "--sign", "key"]) == 2
    assert run(verify) == 9  # signed by ada, but its archives are not here
    assert "origin: ada@example.org" in capsys.readouterr().out
    for name in receipt[1:]:
        assert run(["verify", name, "--sign", "key"]) == 0
    assert run(["verify", *receipt, "--signers", "signers"]) == 0  # a signature does not change an archive's digest
    Path("r.json").write_text(Path("r.json").read_text().replace("reproduced within", "reproduced  within", 1))
    assert run(verify) == 3
    assert "r.json is not what was signed" in capsys.readouterr().out


# --- the web -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    (folder / "served").mkdir()
    with serving_folder(folder / "served") as address:
        yield address


def test_an_archive_is_fetched_and_named_by_its_digest(folder: Path, server: str) -> None:
    (folder / "served" / "x.zip").write_bytes(b"PK\x03\x04, and no more")
    client = api.Client()
    path = client.fetch_archive(f"{server}/x.zip")
    assert path.read_bytes() == b"PK\x03\x04, and no more"
    assert client.fetch_archive(f"{server}/x.zip") == path
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert run(["reproduce", f"{server}/x.zip"]) == 2


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("file:///etc/passwd", 2, "is not the address of an archive"),
        ("ftp://example.org/x.zip", 2, "is not the address of an archive"),
        ("http://", 2, "is not the address of an archive"),
        ("http://[x/a.zip", 2, "is not the address of an archive"),
        ("http://ada:secret@example.org/x.zip", 2, "contains a user name or password"),
        ("http://127.0.0.1:1/x.zip", 10, "cannot be fetched"),
    ],
)
def test_addresses_that_are_of_no_use_are_refused(url: str, code: int, message: str, capsys: Captured) -> None:
    assert run(["reproduce", url]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"PK\x03\x04", b"<html>"])
def test_a_server_that_sends_too_slowly_or_something_else_is_given_up(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    class Slow(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
            with suppress(OSError):
                for _ in range(2000):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)

    monkeypatch.setattr(remote_archives, "ANSWER_SECONDS", 1.5 if body.startswith(b"PK") else 60.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    begun = time.monotonic()
    code = run(["reproduce", f"http://127.0.0.1:{server.server_address[1]}/a.zip"])
    server.shutdown()
    server.server_close()
    assert code == (10 if body.startswith(b"PK") else 2)
    assert ("less than 4096 bytes/s" if code == 10 else "is not an archive") in capsys.readouterr().err
    assert time.monotonic() - begun < 60  # of the 100 that the server takes
    assert not list((Store().folder / "fetched").iterdir())


def test_verify_takes_names_of_runs_and_experiments_and_addresses(folder: Path, capsys: Captured) -> None:
    assert run(["run", "v", "1", "2", "--command", "true", "--share-machine"]) == 0
    assert run(["download", "v-1", "--to", "served/v.zip"]) == 0
    capsys.readouterr()
    with serving_folder(folder / "served") as address:
        assert run(["verify", "v", f"{address}/v.zip"]) == 0
    assert capsys.readouterr().out.count(": ok") == 3
    assert run(["verify", "nobody"]) == 4
