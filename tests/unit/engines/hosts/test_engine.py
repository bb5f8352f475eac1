"""How runs start on hosts, what their folders say, and what is left behind by a start that failed."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlbench_cli.agent.channel import Channel, ChannelRequest, Target
from mlbench_cli.engines.hosts import engine as hosts
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.machines.details import HostRecord, HostsDetails
from mlbench_cli.engines.machines.engine import Place
from mlbench_cli.engines.machines.observe import NodeReport, Snapshot
from mlbench_cli.errors import NeverStartedError, UnreachableError, UsageError
from mlbench_cli.model.run import Ending, Observation, Run
from mlbench_cli.model.spec import RunSpec

SPEC = RunSpec("x-2", "c", "hosts", "custom", "custom", ("true",), "gloo", 2)
FOLDER = "/f/runs/x-2"
STATE: dict[str, Any] = {"ended": None, "ranks": [], "first": None, "started": True}


class Host:
    """A host in memory: its files, what was started on it, and whose run it has. `trouble` is raised by every call."""

    def __init__(self, name: str, *, is_taken: bool = False, note: str | None = "m1 5000") -> None:
        self.target = Target(name, "python3", None)
        self.files: dict[str, bytes] = {}
        self.started: list[tuple[list[str], str, str]] = []
        self.removed: list[str] = []
        self.note = note
        self.trouble: Exception | None = None
        if is_taken:
            self.files[f"{FOLDER}/run.json"] = b'{"id": "other"}'

    def call(self, do: str, data: bytes = b"", **arguments: Any) -> dict[str, Any]:
        """What `Channel.call` gives."""
        if self.trouble is not None:
            raise self.trouble
        path = arguments.get("path", "")
        if do == "put":
            is_new = path not in self.files
            if is_new or not arguments.get("new"):
                self.files[path] = data
            return {"written": is_new}
        if do == "get":
            return {"size": len(self.files[path]) if path in self.files else None}
        if do == "spawn":
            self.started.append((arguments["argv"], arguments["log"], arguments["cwd"]))
        if do == "remove":
            self.removed.append(arguments["folder"])
        if do == "await_file":
            assert path == f"{FOLDER}/rendezvous.json"
            return {"text": self.note}
        return {"folder": "/f/code/x"}

    def call_in_sequence(self, requests: list[ChannelRequest], **_: Any) -> list[dict[str, Any]]:
        """One after the other."""
        return [self.call(request.do, request.data, **request.arguments) for request in requests]

    def exchange(self, do: str, data: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """A file."""
        found = self.files.get(arguments["path"], b"")
        return {"size": len(found)}, found


class Lab:
    """An engine with two hosts of one slot each."""

    def __init__(self, folder: Path, *machines: Host) -> None:
        self.hosts = list(machines) or [Host("m1"), Host("m2")]
        records = [
            HostRecord(name=f"m{n}", login=f"m{n}", slots=1, address=f"10.0.0.{n}", interface=None) for n in (1, 2)
        ]
        self.engine = HostsEngine(HostsDetails(folder="/f", python="/opt/python", hosts=records))
        self.engine._by_host = {host.target.name: cast(Channel, host) for host in self.hosts}
        self.run = Run("abc", SPEC, folder, "2027")

    def submit(self, *, detach: bool = False) -> None:
        self.engine.submit(self.run, self.engine.render(self.run.spec), detach=detach)

    def judge(self, *reports: NodeReport, ended: Ending | None = None, **snapshot: Any) -> Observation:
        found = Snapshot(1.0, dict(enumerate(reports)), **snapshot)
        return self.engine._judge(self.run, found, Observation(1.0, (), ended=ended))


# --- submit ----------------------------------------------------------------------------------------------------------


def test_every_host_gets_the_plan_and_starts_an_agent(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.submit()
    for number, host in enumerate(lab.hosts):
        assert json.loads(host.files[f"{FOLDER}/plan.json"])["name"] == "x-2"
        record = json.loads(host.files[f"{FOLDER}/run.json"])
        assert (record["id"], record["created"], record["spec_hash"]) == ("abc", "2027", SPEC.hash)
        assert f"{FOLDER}/lease" in host.files
        ((argv, log, cwd),) = host.started
        assert (argv[0], argv[-1], log, cwd) == (
            "/opt/python",
            f"{FOLDER}/nodes/{number}",
            f"{FOLDER}/supervisor.log",
            FOLDER,
        )
    assert lab.engine._owned == {"abc"}
    met = [name for name, data in lab.hosts[1].files.items() if data == b"m1 5000"]
    assert len(met) == 1
    assert met[0] not in lab.hosts[0].files


def test_a_detached_run_has_no_lease(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.submit(detach=True)
    assert lab.engine._owned == set()
    assert not any(name.endswith("/lease") for host in lab.hosts for name in host.files)


def test_an_agent_that_was_started_before_is_not_started_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.hosts[0].files[f"{FOLDER}/nodes/0/.state/supervisor.lock"] = b""
    lab.submit()
    assert [len(host.started) for host in lab.hosts] == [0, 1]


def test_a_name_that_another_run_has_is_refused_and_nothing_of_the_new_one_is_left(tmp_path: Path) -> None:
    lab = Lab(tmp_path, Host("m1"), Host("m2", is_taken=True))
    with pytest.raises(UsageError, match='m2 has another run "x-2" in /f/runs/x-2'):
        lab.submit()
    assert [host.removed for host in lab.hosts] == [[FOLDER], []]
    assert [host.started for host in lab.hosts] == [[], []]


def test_a_host_that_does_not_answer_ends_the_start(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.hosts[1].trouble = UnreachableError("m2 does not answer")
    with pytest.raises(UnreachableError, match="m2 does not answer"):
        lab.submit()
    assert lab.hosts[0].removed == [FOLDER]
    assert lab.hosts[0].started == []


def test_an_agent_that_does_not_say_where_it_is_has_not_started(tmp_path: Path) -> None:
    first = Host("m1", note=None)
    first.files[f"{FOLDER}/supervisor.log"] = b"Traceback\nImportError: no module\n"
    with pytest.raises(NeverStartedError, match="The agent on m1 does not start: ImportError: no module") as caught:
        Lab(tmp_path, first, Host("m2")).submit()
    assert caught.value.hint == "mlbench cancel x-2"
    with pytest.raises(NeverStartedError, match="does not start: no reason"):
        Lab(tmp_path, Host("m1", note=None), Host("m2")).submit()


def test_what_was_there_before_a_failed_start_stays() -> None:
    first, second, third = Host("m1"), Host("m2"), Host("m3")
    places = [Place(cast(Channel, host), FOLDER, (0,)) for host in (first, second, third)]
    third.trouble = UnreachableError("away")
    hosts._remove_claims(places, [{"written": True}, {"written": False}, {"written": True}])
    assert [host.removed for host in (first, second)] == [[FOLDER], []]


# --- what the folders say --------------------------------------------------------------------------------------------

ALIVE, LOST, UNKNOWN = NodeReport(STATE, alive=True), NodeReport(STATE, alive=False), NodeReport()


@pytest.mark.parametrize(
    ("reports", "snapshot", "ended"),
    [
        ((ALIVE, ALIVE), {}, None),
        ((ALIVE, UNKNOWN), {}, None),
        ((UNKNOWN, UNKNOWN), {}, None),
        ((LOST, UNKNOWN), {}, Ending.NEVER_STARTED),  # one agent never began, and the other has given up
        ((LOST, LOST), {"is_cancelled": True}, Ending.CANCELLED),
        ((UNKNOWN, UNKNOWN), {"is_cancelled": True}, Ending.CANCELLED),
        ((ALIVE, LOST), {"is_cancelled": True}, None),
        ((LOST, UNKNOWN), {"unreachable": {"m2": "away"}}, None),
        ((UNKNOWN, UNKNOWN), {"exists": False, "unreachable": {"m2": "away"}}, None),
    ],
)
def test_what_follows_for_a_run_that_has_not_ended(
    tmp_path: Path, reports: tuple[NodeReport, ...], snapshot: dict[str, Any], ended: Ending | None
) -> None:
    assert Lab(tmp_path).judge(*reports, **snapshot).ended is ended


def test_an_end_stays_as_it_is(tmp_path: Path) -> None:
    assert Lab(tmp_path).judge(LOST, UNKNOWN, ended=Ending.FAILED, is_cancelled=True).ended is Ending.FAILED


@pytest.mark.parametrize(("was_fetched", "ended"), [(True, Ending.LOST), (False, Ending.NEVER_STARTED)])
def test_a_run_without_a_folder_was_removed_or_never_submitted(
    tmp_path: Path, was_fetched: bool, ended: Ending
) -> None:
    if was_fetched:
        (tmp_path / "manifests").mkdir()
        (tmp_path / "manifests" / "plan.json").touch()
    found = Lab(tmp_path).judge(UNKNOWN, UNKNOWN, exists=False)
    assert (found.ended, [finding.code for finding in found.findings]) == (ended, ["folder_gone"])


@pytest.mark.parametrize(("shares", "lock"), [(False, "take"), (True, "share")])
def test_a_run_takes_its_machines_for_itself_unless_it_may_share_them(tmp_path: Path, shares: bool, lock: str) -> None:
    (plan,) = Lab(tmp_path).engine.render(replace(SPEC, share_machine=shares)).documents
    assert plan["lock"] == lock


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "count", "limit"),
    [
        (1024, 4096, 768, None),  # 256 more are enough
        (1024, 4096, 769, 1025),
        (1024, 2000, 3000, 2000),
        (1024, INFINITE, 3000, 3256),
        (INFINITE, INFINITE, 3000, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, count: int, limit: int | None
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    hosts._allow_open_files(count)
    assert set_to == ([] if limit is None else [(limit, hard)])


# --- continuing and ending -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reports", "snapshot", "starts"),
    [
        ((UNKNOWN, UNKNOWN), {}, True),
        ((ALIVE, UNKNOWN), {}, True),  # one agent waits for the other
        ((ALIVE, ALIVE), {}, False),
        ((LOST, LOST), {}, False),
        ((UNKNOWN, UNKNOWN), {"exists": False}, False),
        ((UNKNOWN, UNKNOWN), {"is_cancelled": True}, False),
        ((UNKNOWN, UNKNOWN), {"unreachable": {"m2": "away"}}, False),
    ],
)
def test_a_submission_whose_client_died_is_completed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reports: tuple[NodeReport, ...],
    snapshot: dict[str, Any],
    starts: bool,
) -> None:
    lab = Lab(tmp_path)
    monkeypatch.setattr(lab.engine, "_sync", lambda run: Snapshot(1.0, dict(enumerate(reports)), **snapshot))
    lab.engine.resume(lab.run)
    assert [len(host.started) for host in lab.hosts] == ([1, 1] if starts else [0, 0])
    assert any(data == b"m1 5000" for data in lab.hosts[1].files.values()) is starts
    assert not any(name.endswith("/lease") for host in lab.hosts for name in host.files)  # it outlives this client
    assert lab.engine._owned == set()


def test_leftovers_of_a_cancelled_run_are_killed_where_its_agents_did_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    done = NodeReport({**STATE, "ended": "cancelled"}, {"archive": None}, alive=False)
    ended: list[str] = []
    for host in lab.hosts:
        monkeypatch.setattr(
            host, "call", lambda do, folder, name=host.target.name: ended.append(f"{name} {do} {folder}")
        )

    def stop(*reports: NodeReport) -> list[str]:
        ended.clear()
        monkeypatch.setattr(lab.engine, "_await_end", lambda run: Snapshot(1.0, dict(enumerate(reports))))
        lab.engine._stop(lab.run, lab.engine._places(lab.run))
        return ended

    assert stop(done, ALIVE) == [f"m2 end_processes {FOLDER}"]
    assert stop(done, done) == []
    assert stop(ALIVE, ALIVE) == [f"m{number} end_processes {FOLDER}" for number in (1, 2)]
    assert stop(ALIVE) == [f"m1 end_processes {FOLDER}"]
