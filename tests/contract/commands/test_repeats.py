"""Repeats, and commands held to a task's goal, through the command line and real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.storage.store import Store
from tests.contract.clients import answer

Captured = pytest.CaptureFixture[str]

# A program whose time, metric and samples follow from its seed: 40 becomes 0.4 s, 40 %, 4000 samples per second.
PROGRAM = """
import json, os, sys, time
time.sleep(0.5)
seed = int(os.environ["MLBENCH_SEED"])
def emit(**fields):
    print("@mlbench " + json.dumps({"v": 1, "rank": 0, "time": time.time(), **fields}))
if seed in map(int, sys.argv[1:]):
    sys.exit(3)
emit(event="metric", name="val_Prec@1", value=seed)
goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 1.0, "kind": "full", "value": seed, "last": seed}
emit(event="result", outcome="goal_reached", goal=goal, wall_seconds=seed / 100, samples=seed * seed)
"""


@pytest.fixture(autouse=True)
def program(home: Path) -> None:
    Path("program.py").write_text(PROGRAM)


def test_seeds_of_a_matrix_are_repeats(capsys: Captured) -> None:
    argv = ["run", "x", "1", "--command", "python program.py", "--matrix", "seed=39,40,41"]
    [found] = answer(capsys, *argv)["repeats"]
    assert found["counted"] == ["x-seed39-1", "x-seed40-1", "x-seed41-1"]
    assert (found["metric"]["count"], found["metric"]["mean"]) == (3, pytest.approx(40, rel=1e-3))
    [found] = answer(capsys, "status")["repeats"]
    assert found["metric"]["count"] == 3
    # The first one's name stands for all of them, and the others' for themselves.
    assert run(["compare", "x-seed40-1", "x-seed41-1"]) == 0
    assert "one run each" in capsys.readouterr().out
    assert run(["compare", "x-seed39-1", "x-seed41-1"]) == 0
    assert "(3 and 1 run)" in capsys.readouterr().out


def test_repeats_of_two_sizes_are_shown_and_compared_by_mean_and_interval(capsys: Captured) -> None:
    argv = ["run", "x", "1", "2", "--command", "python program.py", "--set", "run.run_on_all=no", "--repeat", "3"]
    document = answer(capsys, *argv, "--seed", "39")
    assert [entry["name"] for entry in document["runs"]] == [
        *("x-1-r1", "x-2-r1", "x-1-r2", "x-2-r2", "x-1-r3", "x-2-r3")
    ]
    assert Store().run("x-2-r3").run.spec.seed == 41
    assert run(["status", "x-1"]) == 0
    out, err = capsys.readouterr()
    assert "x-2" not in out
    [line] = [line for line in out.splitlines() if line.startswith("x-1 ") and "samples/s" in line]
    for words in ("400 ms (376 to 426)", "Prec@1 40.0 % (37.6 to 42.6)", "4.00k samples/s (3.76k to 4.26k)"):
        assert words in line.replace("\u00a0", " ")
    assert "95 % interval" in err
    assert run(["status", "x-1", "--watch"]) == 2
    assert "mlbench status x-1-r1 --watch" in capsys.readouterr().err
    assert run(["compare", "x-1", "x-2", "--across", "conditions"]) == 0
    out = capsys.readouterr().out.replace("\u00a0", " ")
    assert out.startswith("No difference seen: x-2 takes 0.945 to 1.06× as long as x-1 (95 %; 3 and 3 runs).")
    assert "400 ms (376 to 426)" in out
    assert run(["compare", "x", "x-2", "--across", "conditions"]) == 0  # the experiment, with both of its sizes
    out, err = capsys.readouterr()
    assert out.startswith("2 workers\n")
    assert "Omitted, because only one side has it: 1 worker (A only)." in err


def test_repeats_that_failed_do_not_count_and_one_alone_has_no_interval(capsys: Captured) -> None:
    argv = ["run", "x", "1", "--command", "python program.py 40 42", "--repeat", "3", "--seed", "40"]
    [repeats] = answer(capsys, *argv, code=7)["repeats"]
    assert (repeats["counted"], repeats["left_out"]) == (["x-1-r2"], ["x-1-r1", "x-1-r3"])
    assert repeats["seconds"] == {"count": 1, "mean": 0.41, "low": None, "high": None, "confidence": 0.95}
    assert run(["status"]) == 0
    assert ["x-1", "1", "1", "of", "3", "410", "ms", "Prec@1", "41.0", "%", "4.10k", "samples/s"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_a_repeat_that_is_damaged_later_does_not_count_any_more(capsys: Captured) -> None:
    """Nor in a process that has read it before, as a dashboard has."""
    assert run(["run", "x", "1", "--command", "python program.py", "--repeat", "3", "--share-machine"]) == 0
    runs = answer(capsys, "status", "x")["repeats"][0]
    assert runs["counted"] == ["x-1-r1", "x-1-r2", "x-1-r3"]
    result = Store().run("x-1-r2").run.folder / "result.json"
    result.write_bytes(result.read_bytes().replace(b"goal_reached", b"goal_missed"))
    assert answer(capsys, "status", "x")["repeats"][0]["counted"] == ["x-1-r1", "x-1-r3"]


def test_a_run_without_repeats_has_no_table_of_them(capsys: Captured) -> None:
    document = answer(capsys, "run", "x", "1", "--command", "python program.py", "--repeat", "1")
    assert "repeats" not in document
    assert answer(capsys, "status")["repeats"] == []
    assert run(["status"]) == 0
    assert "REPEATS" not in capsys.readouterr().out
    assert run(["status", "x-1"]) == 0
    assert run(["status", "x"]) == 0  # the experiment
    assert "REPEATS" not in capsys.readouterr().out


def write_log(*events: dict[str, Any]) -> None:
    """Write log.sh, which reports the events with the time at which it runs."""
    lines = [f"@mlbench {json.dumps({'v': 1, 'rank': 0, 'time': 'NOW', **event})}\n" for event in events]
    Path("log").write_text("".join(lines))
    Path("log.sh").write_text('sed "s/\\"NOW\\"/$(date +%s)/" log\n')


@pytest.mark.slow
@pytest.mark.parametrize(("value", "code"), [(85, 0), (75, 7)])
def test_a_spent_budget_meets_a_required_goal_only_where_it_was_reached_on_the_way(
    capsys: Captured, value: int, code: int
) -> None:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80, "kind": "full", "value": value, "last": value}
    goals = {"full": {"wall_seconds": 0.003, "training_seconds": 0.002}} if value > 80 else {}
    metric = {"event": "metric", "name": "Prec@1", "value": value}
    result: dict[str, Any] = {"event": "result", "outcome": "budget_spent", "goal": goal}
    result |= {"budget_seconds": 2, "wall_seconds": 0.004, "details": {"goals": goals}}
    write_log(metric, result)
    [entry] = answer(capsys, "run", "x", "1", "--command", "sh log.sh", "--require-goal", code=code)["runs"]
    assert entry["outcome"] == "budget_spent"
    assert entry["result"]["goal"]["reached"] == (value > 80)
    assert run(["wait", "x-1"]) == code  # what was required at the start is required of whoever waits
    assert run(["status"]) == 0
    assert "budget_spent" in capsys.readouterr().out
    folder = Store().run("x-1").run.folder
    official = (folder / "official_result.txt").read_text().splitlines()
    assert official[0] == f"Prec@1 of {value} after 0.004 seconds (budget 2, then the last validation)"
    assert run(["charts", "figures", "x-1"]) == 0
    assert Path("figures/total_time.png").stat().st_size > 0


def test_a_command_held_to_a_tasks_goal(capsys: Captured) -> None:
    write_log(*({"event": "metric", "name": "val_global_Prec@1", "value": value} for value in (91.5, 99.5, 98.5)))
    argv = ["run", "own", "1", "--task", "digits_resnet", "--command", "sh log.sh"]
    [entry] = answer(capsys, *argv)["runs"]
    assert entry["outcome"] == "goal_reached"
    assert entry["result"]["division"]["word"] == "open"
    folder = Store().run("own-1").run.folder
    official = (folder / "official_result.txt").read_text().splitlines()
    assert official[0].startswith("98% Top 1 Validation Accuracy reached in ")
    assert official[1].startswith("Division: open (a command of one's own)")
    assert run(["verify", str(folder)]) == 0
    capsys.readouterr()
    assert run(["status", "own-1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Prec@1 >= 98, best 99.5 %" in shown
    assert "LAST BEST MEAN val_global_Prec@1 98.5 % 99.5 % 96.5 %" in shown

    assert run(["run", "own", *argv[2:]]) == 0
    assert "open division: a command of one's own" in capsys.readouterr().err
    [entry] = answer(capsys, "run", "light", *argv[2:], "--light")["runs"]
    assert entry["result"]["goal"]["value"] == 91.5
    Path("log.sh").write_text("echo hello\n")
    assert run(["run", "none", *argv[2:], "--require-goal"]) == 7
