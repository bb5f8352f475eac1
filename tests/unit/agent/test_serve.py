"""What a machine answers to a channel: files, locks, programs, and refusals that the client can tell apart."""

import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import processes, serve
from mlbench_cli.agent.serve import Refused, answer


def ask(do: str, data: bytes = b"", **fields: Any) -> Any:
    """The document of an answer."""
    return answer({"do": do, **fields}, data)[0]


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_for_its_owner_only_and_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new/file"
    assert ask("put", b"1", path=str(path)) == {"written": True}
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"1", 0o600)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert ask("put", b"2", path=str(path), mode=0o644, durable=False) == {"written": True}
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"2", 0o644)
    assert os.listdir(path.parent) == ["file"]


def test_a_new_file_takes_no_others_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert ask("put", b"1", path=str(path), new=True) == {"written": True}
    assert ask("put", b"2", path=str(path), new=True) == {"written": False}
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"1", ["file"])


def test_a_piece_of_a_file_comes_with_the_size_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert answer({"do": "get", "path": str(path), "offset": 3, "size": 4}, b"") == ({"size": 10}, b"3456")
    assert answer({"do": "get", "path": str(path), "offset": 10}, b"") == ({"size": 10}, b"")
    assert answer({"do": "get", "path": str(tmp_path / "none")}, b"") == ({"size": None}, b"")


def test_a_path_may_begin_with_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ask("put", b"1", path="~/a/file")
    assert (tmp_path / "a/file").read_bytes() == b"1"
    found = ask("hello", base="~/none/yet")
    assert (found["home"], found["writable"]) == (str(tmp_path), True)
    assert found["free_bytes"] > 0


def pack(**files: bytes) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def test_code_is_asked_for_checked_and_unpacked_once(tmp_path: Path) -> None:
    data = pack(module=b"1")
    sha256 = hashlib.sha256(data).hexdigest()
    words: Any = {"folder": str(tmp_path / "code"), "sha256": sha256}
    target = str(tmp_path / "code" / sha256)
    assert ask("install", **words) == {"folder": None, "installed": False}
    assert ask("install", data[:-1], **words) == {"error": "the code arrived damaged", "kind": "refused"}
    assert not (tmp_path / "code").exists()
    assert ask("install", data, **words) == {"folder": target, "installed": True}
    assert ask("install", data, **words) == {"folder": target, "installed": False}
    assert (os.listdir(tmp_path / "code"), os.listdir(target)) == ([sha256], ["module"])


def test_code_that_another_client_unpacks_at_the_same_time_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pack(module=b"1")
    sha256 = hashlib.sha256(data).hexdigest()

    def rename(part: str, target: str) -> None:
        os.makedirs(target)
        raise OSError("it is there")

    monkeypatch.setattr(os, "rename", rename)
    assert ask("install", data, folder=str(tmp_path), sha256=sha256)["folder"] == str(tmp_path / sha256)
    assert os.listdir(tmp_path) == [sha256]


def test_a_file_that_does_not_come_is_not_waited_for_beyond_its_time(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert ask("await_file", path=str(tmp_path / "none"), timeout=0.03) == {"text": None}
    assert 0.03 <= time.monotonic() - begun < 5
    (tmp_path / "there").write_text("text")
    assert ask("await_file", path=str(tmp_path / "there"), timeout=0.0) == {"text": "text"}


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two nodes, of which the second has written nothing."""
    place = tmp_path / "runs/r-1/nodes/0"
    (place / ".state").mkdir(parents=True)
    (place / "logs").mkdir()
    (place / "logs/rank-0.log").write_bytes(b"0123456789")
    (place / "logs/rank-1.log").write_bytes(b"abc")
    (place / ".state/beat").write_text("1")
    return tmp_path / "runs/r-1"


def sync(run: Path, nodes: Any, **more: Any) -> tuple[Any, bytes]:
    document, data = answer({"do": "sync", "folder": str(run), "nodes": nodes, **more}, b"")
    return document, data


def test_logs_come_from_where_the_client_has_them_and_in_the_order_of_the_pieces(run: Path) -> None:
    document, data = sync(run, {"0": {"0": 4, "1": 0, "2": 0}, "1": {}})
    assert (document["pieces"], data) == ([[0, 4, 6], [1, 0, 3]], b"456789abc")
    assert (document["exists"], document["cancel"]) == (True, False)
    assert document["nodes"]["1"] == {"state": None, "results": None, "alive": None, "beat_age": None}


@pytest.mark.parametrize(("limit", "pieces"), [(6, [[0, 4, 6]]), (8, [[0, 4, 6], [1, 0, 2]]), (3, [[0, 4, 3]])])
def test_an_answer_has_as_many_bytes_of_logs_as_were_asked_for(run: Path, limit: int, pieces: list[list[int]]) -> None:
    document, data = sync(run, {"0": {"0": 4, "1": 0}}, limit=limit)
    assert document["pieces"] == pieces
    assert len(data) == sum(size for _, _, size in pieces)


def test_the_age_of_a_beat_is_by_the_clock_of_the_file_system(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(run / "nodes/0/.state/beat", (time.time() - 50,) * 2)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert sync(run, {"0": {}})[0]["nodes"]["0"]["beat_age"] == pytest.approx(50, abs=5)


def test_a_lease_is_renewed_only_if_there_is_one_and_that_is_asked_for(run: Path) -> None:
    sync(run, {}, renew=True)
    assert not (run / "lease").exists()
    (run / "lease").touch()
    os.utime(run / "lease", (1000, 1000))
    sync(run, {})
    assert (run / "lease").stat().st_mtime == 1000
    sync(run, {}, renew=True)
    assert (run / "lease").stat().st_mtime > 1000


def test_a_run_whose_folder_is_gone_is_said_to_be(run: Path, tmp_path: Path) -> None:
    assert sync(tmp_path / "none", {"0": {"0": 0}}) == ({"exists": False, "nodes": {}, "pieces": []}, b"")
    (run / "cancel").touch()
    assert sync(run, {})[0]["cancel"] is True


def test_a_supervisor_that_ends_while_it_is_looked_at_has_its_last_words_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run that ended well would look like one whose supervisor was killed."""
    state = run / "nodes/0/.state/state.json"
    state.write_text('{"ended": null}')

    def end(note: object) -> bool:
        state.write_text('{"ended": "exited"}')
        (run / "nodes/0/.state/results.json").write_text('{"problem": null}')
        return False

    monkeypatch.setattr(processes, "is_alive", end)
    report = sync(run, {"0": {}})[0]["nodes"]["0"]
    assert (report["state"], report["results"], report["alive"]) == ({"ended": "exited"}, {"problem": None}, False)


def test_only_the_folder_of_a_run_without_processes_is_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("remove", folder=str(run))["error"] == f"{run} is not the folder of a run"
    (run / "run.json").write_text("{}")
    monkeypatch.setattr(processes, "find_processes", lambda folder, arguments: [11])
    assert ask("remove", folder=str(run)) == {"error": "its processes are still running", "kind": "refused"}
    assert run.exists()
    assert ask("remove", folder=str(run), force=True) == {}
    assert not run.exists()
    monkeypatch.setattr(processes, "find_processes", lambda folder, arguments: [])
    assert ask("remove", folder=str(run)) == {}  # it has been removed
    run.mkdir()
    assert ask("remove", folder=str(run)) == {}  # nothing has been put into it yet
    assert not run.exists()


def test_runs_are_listed_with_what_they_say_of_themselves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        processes, "find_processes", lambda folder, arguments: [11] if folder.startswith(f"{run}/") else []
    )
    monkeypatch.setattr(processes, "is_alive", lambda note: note["alive"])
    (run / "nodes/0/.state/state.json").write_text('{"alive": true}')
    (run.parent / "r-2").mkdir()
    (run.parent / "r-2/run.json").write_text('{"id": 2}')
    (run.parent / "r-2/fetched").touch()
    (run.parent / ".hidden").mkdir()
    (run.parent / "file").touch()
    first, second = ask("list_runs", base=str(run.parent))["runs"]
    assert first == {"name": "r-1", "run": None, "fetched": False, "processes": [11], "supervised": True}
    assert second == {"name": "r-2", "run": {"id": 2}, "fetched": True, "processes": [], "supervised": False}
    (run / "nodes/0/.state/state.json").write_text('{"alive": null}')
    assert not ask("list_runs", base=str(run.parent))["runs"][0]["supervised"]
    assert ask("list_runs", base=str(run / "none")) == {"runs": []}


# --- locks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def locks() -> Iterator[None]:
    yield
    for held in serve.LOCKS.values():
        os.close(held)
    serve.LOCKS.clear()


def test_a_lock_excludes_others_until_it_is_let_go(tmp_path: Path, locks: None) -> None:
    path = str(tmp_path / "new/lock")
    assert ask("lock", path=path) == {}
    before = len(os.listdir("/proc/self/fd"))
    assert ask("lock", path=path, patience=0.0) == {"error": f"another client holds {path}", "kind": "refused"}
    assert len(os.listdir("/proc/self/fd")) == before
    assert ask("unlock", path=path) == {}
    assert ask("lock", path=path, patience=0.0) == {}
    assert ask("unlock", path=str(tmp_path / "other")) == {}


# --- programs -------------------------------------------------------------------------------------------------------


def test_a_program_gets_no_settings_of_the_user_that_change_slurms_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_FORMAT", "SBATCH_QOS", "SLURM_JOB_ID", "SLURM_CONF", "LC_ALL", "KEPT"):
        monkeypatch.setenv(name, "users")
    found = ask("run", argv=["env"], env={"GIVEN": "1"})
    variables = dict(line.split("=", 1) for line in found["out"].splitlines() if "=" in line)
    assert found["code"] == 0
    assert not {"SQUEUE_FORMAT", "SBATCH_QOS", "SLURM_JOB_ID"} & variables.keys()
    assert (variables["SLURM_CONF"], variables["KEPT"], variables["GIVEN"]) == ("users", "users", "1")
    assert (variables["LC_ALL"], variables["SLURM_TIME_FORMAT"]) == ("C", "%s")


def test_the_end_of_a_program_is_told_whatever_it_is() -> None:
    assert ask("run", argv=["sh", "-c", "cat; echo err >&2; exit 3"], stdin="in") == {
        "code": 3,
        "out": "in",
        "err": "err\n",
    }
    missing = ask("run", argv=["no-such-program"])
    assert (missing["code"], missing["err"]) == (127, "no-such-program: No such file or directory")
    slow = ask("run", argv=["sleep", "60"], timeout=0.05)
    assert (slow["code"], slow["err"]) == (None, "no answer within 0.05 s")


def test_a_python_that_gives_no_answer_is_refused_in_its_last_words() -> None:
    with pytest.raises(Refused, match=r"^of it$"):
        serve.probe(sys.executable, setup='echo first >&2; echo "of it" >&2; exit 1')
    with pytest.raises(Refused, match=r"^/bin/true gives no answer$"):
        serve.probe("/bin/true")


# --- answers --------------------------------------------------------------------------------------------------------


def test_errors_of_the_system_name_the_file_and_their_number(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = ask("get", path=str(tmp_path / "file/below"))
    problem = f"Not a directory: {tmp_path}/file/below"
    assert found == {"error": problem, "kind": "system", "errno": 20}


def test_a_sequence_gives_each_request_its_part_of_the_data_and_ends_with_the_first_failure(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"do": "put", "path": str(tmp_path / "a"), "size": 2},
        {"do": "put", "path": str(tmp_path / "b"), "size": 3},
        {"do": "lock", "path": "/proc/none/lock", "patience": 0.0, "size": 0},
        {"do": "put", "path": str(tmp_path / "c"), "size": 1},
    ]
    found = ask("sequence", b"112223", requests=requests)["answers"]
    assert [sorted(item) for item in found] == [["written"], ["written"], ["errno", "error", "kind"]]
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"11", b"222")
    assert not (tmp_path / "c").exists()


def test_requests_are_answered_until_the_client_closes_the_connection(tmp_path: Path) -> None:
    request = json.dumps({"do": "put", "path": str(tmp_path / "a")}).encode()
    get = json.dumps({"do": "get", "path": str(tmp_path / "a")}).encode()
    source = io.BytesIO(b"%d 4\n%sdata%d 0\n%s" % (len(request), request, len(get), get))
    sink = io.BytesIO()
    serve.serve(source, sink)
    first, second = b'{"written": true}', b'{"size": 4}'
    answers = b"%d 0\n%s%d 4\n%sdata" % (len(first), first, len(second), second)
    assert sink.getvalue() == serve.MARKER + answers


def test_a_port_of_this_machine_is_reached_and_a_closed_one_is_not() -> None:
    port = ask("listen")["port"]
    assert ask("connect", address="127.0.0.1", port=port) == {"reached": True, "own": "127.0.0.1"}
    serve.SERVERS.pop().close()
    found = ask("connect", address="127.0.0.1", port=port, patience=1.0)
    assert found == {"reached": False, "problem": "Connection refused"}
