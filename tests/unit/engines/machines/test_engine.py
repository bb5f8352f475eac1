"""Parts that engines of machines share: answers of several hosts, runs of others, and plans of agents."""

import io
import tarfile
import zipfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.agent.channel import Channel, Target
from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.machines import engine as machines
from mlbench_cli.engines.machines.details import HostsDetails, MachineDetails
from mlbench_cli.engines.machines.engine import Orphan, Place, ask_all, do_all, run_in_parallel
from mlbench_cli.engines.machines.observe import NodeReport, Snapshot
from mlbench_cli.engines.machines.placement import NodeShare, share_nodes
from mlbench_cli.engines.machines.plan import make_plan, pack_agent, pack_code, start_command
from mlbench_cli.errors import MlbenchError, UnreachableError, UsageError
from mlbench_cli.model.spec import RunSpec

SPEC = RunSpec("x-3", "c", "hosts", "custom", "custom", ("true",), "gloo", 3)
STATE: dict[str, Any] = {"ended": None, "ranks": [], "first": None}

# --- several machines at once ----------------------------------------------------------------------------------------


def work(item: int) -> int:
    if item < 0:
        raise UsageError(f"no {item}")
    return 10 * item


def messages(answers: list[Any]) -> list[Any]:
    return [answer.message if isinstance(answer, MlbenchError) else answer for answer in answers]


@pytest.mark.parametrize("items", [[], [1], [-1], [1, -2, 3], [-1, -2]])
def test_answers_are_in_the_order_of_the_machines(items: list[int]) -> None:
    assert messages(run_in_parallel(work, items)) == [f"no {item}" if item < 0 else 10 * item for item in items]


def test_one_answer_is_enough_or_all_are_needed() -> None:
    assert messages(ask_all(work, [-1, 2])) == ["no -1", 20]
    assert (ask_all(work, []), do_all(work, []), do_all(work, [1, 2])) == ([], [], [10, 20])
    for asked, items in ((ask_all, [-1, -2]), (do_all, [-1, 2])):
        with pytest.raises(UsageError, match="no -1"):
            asked(work, items)


def test_other_errors_are_not_answers() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_parallel(lambda item: item // 0, [1])


# --- one snapshot of all ---------------------------------------------------------------------------------------------


def place(name: str, *nodes: int) -> Place:
    channel = type("Named", (), {"target": type("T", (), {"name": name})()})()
    return Place(cast(Channel, channel), "/f", nodes)


PLACES = [place("m1", 0), place("m2", 1, 2)]
GONE = UnreachableError("m2 does not answer")


def answer(exists: bool = True, cancel: bool = False, **nodes: Any) -> dict[str, Any]:
    return {
        "exists": exists,
        "cancel": cancel,
        "nodes": {number.strip("n"): report for number, report in nodes.items()},
    }


def test_reports_of_all_hosts_become_one_snapshot() -> None:
    silent = {"m1": 1.0}
    found = machines._merge(PLACES, [answer(n0={"state": STATE}), answer(False, n2={"alive": True})], {}, silent)
    assert found.nodes == {0: NodeReport(STATE), 1: NodeReport(), 2: NodeReport(alive=True)}
    assert (found.unreachable, found.exists, found.is_cancelled, silent) == ({}, True, False, {})
    gone = machines._merge(PLACES, [answer(False), answer(False, cancel=True)], {}, {})
    assert (gone.exists, gone.is_cancelled) == (False, True)


def test_of_a_host_that_is_silent_the_last_report_stays_without_its_results() -> None:
    before = {1: NodeReport(STATE, {"archive": None}, alive=True, beat_age=50.0)}
    silent: dict[str, float] = {}
    found = machines._merge(PLACES, [answer(), GONE], before, silent)
    assert found.nodes[1] == NodeReport(STATE, None, None, 0.0, is_silent=True)
    assert found.nodes[2] == NodeReport(beat_age=0.0, is_silent=True)
    assert found.unreachable == {"m2": "m2 does not answer"}
    assert list(silent) == ["m2"]


@pytest.mark.parametrize(("seconds", "is_given_up"), [(100.0, False), (100.1, True)])
def test_a_host_that_is_silent_for_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_given_up: bool
) -> None:
    monkeypatch.setattr(machines, "unreachable_timeout", lambda: 100.0)
    monkeypatch.setattr(machines, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 5000.0 + seconds))
    found = machines._merge(PLACES, [answer(), GONE], {}, {"m2": 5000.0})
    assert [found.nodes[number].is_given_up for number in range(3)] == [False, is_given_up, is_given_up]


def test_a_host_that_the_run_goes_on_without_is_not_unreachable() -> None:
    lost = {"state": {**STATE, "lost_nodes": [1, 2]}}
    found = machines._merge(PLACES, [answer(n0=lost), GONE], {}, {})
    assert found.unreachable == {}
    assert [found.nodes[number].is_given_up for number in range(3)] == [False, True, True]
    part = {"state": {**STATE, "lost_nodes": [1]}}
    assert machines._merge(PLACES, [answer(n0=part), GONE], {}, {}).unreachable == {"m2": "m2 does not answer"}


def test_what_hosts_that_were_given_up_have_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "unreachable_timeout", lambda: 90.0)
    given_up = NodeReport(STATE, is_given_up=True)
    snapshot = Snapshot(1.0, {0: NodeReport(STATE), 1: given_up}, {"m2": "why"})
    (finding,) = machines._explain_silence(snapshot)
    assert finding.code == "results_lost"
    assert finding.summary.startswith("m2 has not responded for 1 min 30 s: output and ends of logs are missing.")
    assert machines._explain_silence(Snapshot(1.0, {0: NodeReport(STATE), 1: NodeReport(STATE)})) == []


def test_what_a_run_has_left_behind_is_missing() -> None:
    first = NodeReport({**STATE, "lost_nodes": [1, 2]}, {"archive": None})
    named = NodeReport({**STATE, "node_name": "m2"})
    snapshot = Snapshot(1.0, {0: first, 1: named, 2: NodeReport()})
    (finding,) = machines._explain_silence(snapshot)
    assert "of m2, node 2 are missing" in finding.summary
    assert finding.evidence == {"nodes": [1, 2]}
    fetched = replace(named, results={"archive": None})
    assert machines._explain_silence(Snapshot(1.0, {0: first, 1: fetched, 2: fetched})) == []


# --- runs of others --------------------------------------------------------------------------------------------------


class Host:
    """Lists runs, and remembers what it was asked."""

    def __init__(self, name: str, *runs: dict[str, Any]) -> None:
        self.target = Target(name, "python3", None)
        self.runs = runs
        self.calls: list[tuple[str, str]] = []

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append((do, str(arguments.get("base") or arguments.get("folder"))))
        return {"runs": self.runs}


def entry(name: str, **more: Any) -> dict[str, Any]:
    run = {"id": f"id of {name}", "created": more.pop("created", "2027"), "spec": replace(SPEC, name=name).to_dict()}
    return {"name": name, "run": run, "fetched": False, "processes": [], "supervised": True, **more}


def engine_of(*hosts: Host) -> HostsEngine:
    engine = HostsEngine(HostsDetails(folder="/f"))
    engine._by_host = {str(number): cast(Channel, host) for number, host in enumerate(hosts)}
    return engine


def test_runs_of_all_hosts_are_found_once_the_oldest_first() -> None:
    newest, oldest = entry("a-1", created="2028", fetched=1), entry("b-1", created="2026")
    broken = {**entry("c-1"), "run": {"id": "x"}}
    found = engine_of(Host("m1", newest, oldest, broken), Host("m2", newest)).discover()
    assert [getattr(item, "id", None) or item.name for item in found] == ["c-1", "id of b-1", "id of a-1"]  # type: ignore[union-attr]
    assert [getattr(item, "is_fetched", None) for item in found] == [None, False, True]


def test_processes_without_an_agent_are_orphans_and_are_ended() -> None:
    orphan = entry("a-1", processes=[7, 8], supervised=False)
    host = Host("m1", orphan, entry("b-1", processes=[9]), entry("c-1", supervised=False))
    engine = engine_of(host)
    assert engine.list_orphans() == [Orphan("m1", "a-1", (7, 8))]
    host.calls.clear()
    engine.end_orphans()
    assert host.calls == [("list_runs", "/f/runs"), ("end_processes", "/f/runs/a-1")]


# --- plans -----------------------------------------------------------------------------------------------------------

DETAILS = MachineDetails(folder="/f", python="/opt/python", interface="ib0", env={"A": "details", "B": "details"})


def test_the_plan_of_a_run() -> None:
    options = replace(SPEC.kubernetes, env={"B": "run", "RANK": "9"})
    plan = make_plan(replace(SPEC, kubernetes=options, pin=True), DETAILS, share_nodes(SPEC), lock="take", grace=2.5)
    environment = plan["environment"]
    assert (environment["A"], environment["B"], environment["WORLD_SIZE"]) == ("details", "run", "3")
    assert {key: plan[key] for key in plan if key not in ("environment", "nodes", "defaults")} == {  # type: ignore[literal-required]
        "kind": "MachinesRun",
        "schema_version": 1,
        "name": "x-3",
        "spec_hash": replace(SPEC, kubernetes=options, pin=True).hash,
        "timeout": 86400.0,
        "gpus_per_worker": 0,
        "pin": True,
        "python": "/opt/python",
        "installed_code_only": False,
        "launcher": [],
        "interface": "ib0",
        "interface_variables": ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"],
        "meeting_seconds": 300.0,
        "lease_seconds": 60.0,
        "grace": 2.5,
        "lock": "take",
    }
    assert [(node["name"], node["workers"], [rank["rank"] for rank in node["ranks"]]) for node in plan["nodes"]] == [
        (None, [0], [0]),
        (None, [1], [1]),
        (None, [2], [2]),
    ]


@pytest.mark.parametrize(
    ("preset", "launcher", "only"), [("tiny", (), True), ("tiny", ("apptainer",), False), ("custom", (), False)]
)
def test_a_task_of_the_catalog_runs_only_installed_code_unless_it_is_in_a_container(
    preset: str, launcher: tuple[str, ...], only: bool
) -> None:
    spec = replace(SPEC, task="mnist", preset=preset)
    assert make_plan(spec, DETAILS, share_nodes(spec), lock="take", launcher=launcher)["installed_code_only"] is only


SHRINKING = replace(SPEC, on_failure="shrink", workers=4, parameters={"batch_size": 3})
TWO = [NodeShare((0, 1)), NodeShare((2, 3))]
ONE_EACH = [NodeShare((worker,)) for worker in range(4)]


@pytest.mark.parametrize(
    ("faults", "nodes"),
    [
        ("at 9s node 2 gone", ONE_EACH),  # 12 samples for 3 ranks
        ("at 9s node 2 gone; at 19s node 1 gone", ONE_EACH),  # then 2
        ("at 9s node 2 gone", TWO),  # both workers of the machine
        ("at 9s kill rank 0", TWO),
        (None, TWO),
    ],
)
def test_a_run_that_shrinks_to_a_whole_share_of_its_batch_is_planned(
    faults: str | None, nodes: list[NodeShare]
) -> None:
    make_plan(replace(SHRINKING, faults=faults), DETAILS, nodes, lock="take")


@pytest.mark.parametrize(
    ("faults", "nodes", "batch", "words", "hint"),
    [
        ("at 9s node 1 gone", TWO, 3, "this is the machine of worker 0", "For example at 60s node 3 gone"),
        ("at 9s node 0 gone", ONE_EACH, 3, "this is the machine of worker 0", "For example at 60s node 3 gone"),
        ("at 9s node 1 gone", [NodeShare((0, 1, 2, 3))], 3, "this is the machine of worker 0", "Remove it."),
        (
            "at 9s node 2 gone",
            ONE_EACH,
            1,
            "a global batch of 4 samples cannot be divided evenly among 3",
            "batch_size=12",
        ),
    ],
)
def test_a_run_that_cannot_shrink_so_is_refused(
    faults: str, nodes: list[NodeShare], batch: int, words: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(replace(SHRINKING, faults=faults, parameters={"batch_size": batch}), DETAILS, nodes, lock="take")
    assert words in caught.value.message
    assert hint in str(caught.value.hint)


def test_copies_of_checkpoints_need_a_second_machine() -> None:
    spec = replace(SHRINKING, checkpoint_copy="peer")
    make_plan(spec, DETAILS, TWO, lock="take")
    with pytest.raises(UsageError, match="all workers are on one machine"):
        make_plan(spec, DETAILS, [NodeShare((0, 1, 2, 3))], lock="take")


def test_the_code_for_machines_is_byte_stable_and_holds_no_caches() -> None:
    data, digest = pack_code()
    assert pack_code() == (data, digest)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names)
    assert {"mlbench_cli/agent/node.py", "mlbench_cli/model/faults.py", "task_images/contract.py"} < set(names)
    assert not [name for name in names if "__pycache__" in name]
    assert {(member.mode, member.mtime, member.uid) for member in members} == {(0o644, 0, 0)}


def test_the_agent_for_pods_is_a_zip_without_the_tasks() -> None:
    with zipfile.ZipFile(io.BytesIO(pack_agent())) as archive:
        names = archive.namelist()
    assert names == sorted(names)
    assert [name for name in names if name.startswith("task_images/")] == [
        *("task_images/__init__.py", "task_images/harness/__init__.py", "task_images/harness/cores.py")
    ]
    assert {"mlbench_cli/agent/pod.py", "mlbench_cli/errors.py"} < set(names)


def test_agents_import_only_their_own_code() -> None:
    """-I: no variables, no user's packages, no current folder; -S: no site-packages."""
    command = start_command("/opt/python", "/f/code/abc")
    assert (command[:4], command[5:]) == (["/opt/python", "-I", "-S", "-c"], ["/f/code/abc"])
