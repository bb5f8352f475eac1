"""The local engine's way in: what ranks are given, where it is written, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec, canonical_json
from tests.contract.local_runs import SLEEP, Lab, processes_of, python, shell, until


def seen_by(run: Run, rank: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run.folder / f"output/rank-{rank}/seen.json").read_bytes())
    return document


def test_render_is_pure_and_says_what_will_run(tmp_path: Path) -> None:
    spec = RunSpec("r-2", "local", "local", "custom", "custom", ("prog", "{rank}"), "gloo", 2)
    (plan,) = LocalEngine().render(spec).documents
    assert canonical_json(plan) == canonical_json(LocalEngine().render(spec).documents[0])
    assert plan["environment"]["MASTER_PORT"] == "chosen at start"
    assert [rank["argv"] for rank in plan["ranks"]] == [["prog", "{rank}"]] * 2  # known when they start
    assert not list(tmp_path.iterdir())


def test_secrets_do_not_leave_the_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-in-the-clear")
    run = lab.start(("true",))
    lab.end(run)
    held = [path for path in run.folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert held == []


def test_submitting_again_adopts_and_another_spec_is_refused(lab: Lab) -> None:
    run = lab.start(SLEEP)
    (before,) = processes_of(run)
    LocalEngine().submit(run, lab.engine.render(run.spec))
    assert processes_of(run) == [before]
    other = Run(
        run.id, RunSpec("other-1", "local", "local", "custom", "custom", ("true",), "gloo", 1), run.folder, run.created
    )
    with pytest.raises(UsageError, match="holds another run"):
        lab.engine.submit(other, lab.engine.render(other.spec))


def test_two_runs_at_once_have_ports_of_their_own(lab: Lab) -> None:
    runs = [lab.start(shell("echo $MASTER_PORT; exec sleep 600")) for _ in range(2)]
    ports = {until(lambda run=run: (run.folder / "logs/rank-0.log").read_bytes()) for run in runs}  # type: ignore[misc]
    assert len(ports) == 2


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_folder_that_cannot_be_made_is_a_usage_error(lab: Lab, obstacle: str) -> None:
    run = lab.record(("true",))
    folder = Path("/proc/sys/mlbench") if obstacle == "read-only" else run.folder.with_name("other")
    if obstacle == "file":
        folder.write_text("in the way")
    planned = Run(run.id, run.spec, folder, run.created)
    with pytest.raises(UsageError, match="cannot be created") as caught:
        lab.engine.submit(planned, lab.engine.render(run.spec))
    assert caught.value.hint
    assert "MLBENCH_HOME" in caught.value.hint


def test_resources_are_written_per_rank_with_their_children(lab: Lab) -> None:
    gate = lab.store.folder / "gate"
    cached = 'for _ in range(2000): open(os.__file__, "rb").read()'
    burn = "block = bytearray(40_000_000)\nwhile time.process_time() < 0.3: pass\n"
    burn = f'import os, time\n{cached}\n{burn}while not os.path.exists("{gate}"): time.sleep(0.05)'
    run = lab.start(shell(f"if [ $RANK = 0 ]; then python -c '{burn}'; exit 0; fi"), workers=2)

    def samples() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (run.folder / "resources.jsonl").read_text().splitlines()]
        return [line for line in lines if line.get("kind") != "machine"]

    # However seldom a slow machine lets the agent look for new processes.
    until(lambda: any(line["rank"] == 0 and line["rss_bytes"] > 40_000_000 for line in samples()))
    gate.touch()
    assert (lab.end(run).seconds or 0.0) >= 0.3  # although rank 1 has ended before
    mine = [line for line in samples() if line["rank"] == 0]
    assert {line["rank"] for line in samples()} == {0, 1}
    assert len(mine) >= 2
    assert mine[-1]["cpu_seconds"] >= 0.3
    assert mine[-1]["peak_rss_bytes"] > 40_000_000
    assert max(line["read_bytes"] for line in mine if "read_bytes" in line) < 40_000_000  # of a disk
    assert [line["cpu_seconds"] for line in mine] == sorted(line["cpu_seconds"] for line in mine)


AFFINITY = python(
    "import json, os; open(os.environ['MLBENCH_OUTPUT_DIR'] + '/seen.json', 'w').write(json.dumps("
    "{'cpus': sorted(os.sched_getaffinity(0)), 'all': os.environ.get('MLBENCH_PINNED_FROM')}))"
)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be shared")
def test_bound_ranks_have_cpus_of_their_own(lab: Lab) -> None:
    usable = sorted(os.sched_getaffinity(0))
    run = lab.start(AFFINITY, workers=2, pin=True)
    assert lab.end(run).ended == "exited"
    first, second = (seen_by(run, rank) for rank in range(2))
    assert len(first["cpus"]) == len(second["cpus"]) == len(usable) // 2
    assert not {*first["cpus"]} & {*second["cpus"]}
    assert first["all"] == second["all"] == ",".join(map(str, usable))
    free = lab.start(AFFINITY, workers=2)
    assert lab.end(free).ended == "exited"
    assert seen_by(free, 0) == {"cpus": usable, "all": None}


def test_more_bound_ranks_than_cpus_are_never_started(lab: Lab) -> None:
    """The request is refused before; this is what a changed machine leads to."""
    number = len(os.sched_getaffinity(0)) + 1
    with pytest.raises(UsageError, match=f"run.pin: {number} processes cannot each have their own CPUs"):
        lab.start(AFFINITY, workers=number, pin=True)
