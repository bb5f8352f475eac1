"""Whatever ranks print and whatever strangers write into an archive, the judge answers, for that archive alone."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from mlbench_cli.app import run
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal, write_sums
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.storage import run_folder
from tests.unit.results.runs import event, new_run, observation_of, result_event, sealed_run, spec, training_log

NUMBERS = (0, -1, 1e308, -1e308, 1.7e308, 2**63, -(2**70), 10**400, 253402300800.0, 1e300, 1e-320, 0.1, 3)
VALUES: some.SearchStrategy[Any] = some.one_of(
    some.sampled_from([*NUMBERS, None, True, "", "nan", "inf", "9999-12-31T23:59:59Z", "\ud800", "x" * 300, [], {}]),
    some.lists(some.sampled_from(NUMBERS), max_size=3),
    some.dictionaries(some.sampled_from(["rank0", "min", "name", "seconds", "kind"]), some.sampled_from(NUMBERS)),
)
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
SAMPLES = [{"time": 1_760_000_000.0 + 10 * n, "rank": 0, "cpu_seconds": 1.0 * n, "log_bytes": n} for n in range(3)] + [
    {"time": 1_760_000_000.0 + n, "kind": "machine", "elapsed_seconds": 1.0 * n, "cores": 2} for n in range(3)
]
SAMPLES += [
    {"kind": "network", "stage": "before", "nodes": 2, "networks": 2, "links": [{"rtt_p50_seconds": 0.01}],
     "counters": [{"tx_bytes": 1}, {}], "seconds": 0.1},
    *({"kind": "interface", "worker": node, "tx_bytes": 9, "interface": "eth0"} for node in range(2)),
]  # fmt: skip
FAULTS = {
    "script": None, "seed": 1, "policy": "restart", "began": 1.76e9, "ended": 60.0,
    "attempts": [{"started": 0.0, "training": 1.0, "ended": 20.0, "ranks": 2}, {"started": 21.0, "ranks": 2}],
    "events": [{"at": 5.0, "planned": {"kind": "kill", "target": 1}}],
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a path."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return changed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed archive with every kind of evidence."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    logs = {rank: training_log(rank) for rank in range(2)}
    logs[0].insert(1, event("metric", at=30.0, name="checkpoint_seconds", value=0.1, step=3))
    run = new_run(folder, spec(on_failure="restart"), logs)
    (folder / run_folder.RESOURCES).write_text("".join(f"{json.dumps(row)}\n" for row in SAMPLES))
    (folder / run_folder.FAULTS).write_text(json.dumps({"schema_version": 1, **FAULTS}))
    (folder / run_folder.SHAPING).write_text(json.dumps({"schema_version": 1, "method": "netem", "probes": []}))
    write_run_document(run)
    seal(run, observation_of(2, seconds=103.0))
    return folder


@FUZZ
@given(data=some.data())
def test_no_document_of_a_stranger_breaks_the_judge(whole: Path, tmp_path: Path, data: some.DataObject) -> None:
    folder = tmp_path / "edited"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    names = sorted(path.name for path in folder.glob("*.json"))
    name = data.draw(some.sampled_from([*names, run_folder.RESOURCES]))
    lines = [(folder / name).read_text()] if name in names else (folder / name).read_text().splitlines()
    number = data.draw(some.integers(0, len(lines) - 1))
    document = json.loads(lines[number])
    path = data.draw(some.sampled_from(list(places(document))))
    lines[number] = json.dumps(put(document, path, data.draw(VALUES)))
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    write_sums(folder)
    verify(folder)  # answers


EVENTS: dict[str, dict[str, Any]] = {
    "metric": {"name": "val_Prec@1", "value": 80.5, "epoch": 1, "step": 3, "seconds": 10.0, "unit": "%"},
    "phase": {"phase": "training", "epoch": 1, "epochs": 3, "step": 1, "steps": 9},
    "environment": {"env": {"OMP_NUM_THREADS": "1"}, "world_size": 2, "nccl": {"network": "x"}, "memlock_bytes": 5},
    "result": json.loads(result_event().partition(" ")[2]),
}


@settings(FUZZ, max_examples=40)
@given(data=some.data())
def test_no_event_of_a_rank_keeps_a_run_from_being_sealed(tmp_path: Path, data: some.DataObject) -> None:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    kind = data.draw(some.sampled_from(sorted(EVENTS)))
    fields = EVENTS[kind]
    lines = training_log(0)
    for _ in range(data.draw(some.integers(1, 2))):
        path = data.draw(some.sampled_from([found for found in places(fields) if found]))
        fields = put(fields, path, data.draw(VALUES)) if path in list(places(fields)) else fields
    line = f"@mlbench {json.dumps({'v': 1, 'rank': 0, 'time': 1.76e9 + 50, **fields, 'event': kind})}"
    run = new_run(folder, spec(), {0: [*lines, line], 1: training_log(1)})
    write_run_document(run)
    seal(run, observation_of(2))
    assert verify(folder).problems == ()


def test_one_bad_archive_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = sealed_run(tmp_path / "good"), sealed_run(tmp_path / "bad")
    observation = json.loads((bad / run_folder.OBSERVATION).read_text())
    observation["workers"][0]["finished"] = 1e300
    (bad / run_folder.OBSERVATION).write_text(json.dumps(observation))
    write_sums(bad)
    assert run(["verify", str(bad), str(good)]) == 2
    shown = capsys.readouterr().out
    assert f"{good}: ok" in shown
    assert "finished" in shown
    (tmp_path / "in").mkdir()
    good.rename(tmp_path / "in" / "good")
    bad.rename(tmp_path / "in" / "bad")
    assert run(["site", str(tmp_path / "in"), "--to", str(tmp_path / "site"), "--leave-out"]) == 0
    assert "left out" in capsys.readouterr().err
