"""Which runs repeat each other, under which name, and what their repeats give together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Experiment, Member, Run, RunRow, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.families import find_families
from mlbench_cli.runs.repeats import repeats_in, runs_named
from mlbench_cli.storage.store import Store
from tests.unit.results.runs import record_sealed

T_1 = 12.706  # 97.5 % quantile of Student's t with one degree of freedom


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def record(store: Store, name: str, workers: int = 1, seed: int = 42, created: int = 0, **fields: Any) -> Run:
    spec = RunSpec(name, "local", "local", "mnist", "tiny", ("true",), "gloo", workers, seed=seed, **fields)
    return store.record_run(spec, created=f"2027-01-15T08:00:{created:02d}.000Z")


def join(store: Store, name: str, *runs: Run, points: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Record an experiment with these runs; `points` are those of the matrix, by run."""
    members = tuple(
        Member(number, run.id, run.spec.content_hash, (points or {}).get(run.name, {}))
        for number, run in enumerate(runs)
    )
    store.record_experiment(Experiment(f"id of {name}", name, "2027-01-15T08:00:00.000Z", {}, members), ())


def families(store: Store, *names: str) -> list[tuple[str, list[str]]]:
    """Name and runs of the families of these runs."""
    rows = [store.run(name) for name in names]
    return [(family.name, [row.run.name for row in family.rows]) for family in find_families(store, rows)]


def test_members_of_equal_size_repeat_each_other(store: Store) -> None:
    runs = [record(store, name, size) for name, size in (("x-1-r1", 1), ("x-2-r1", 2), ("x-1-r2", 1), ("x-2-r2", 2))]
    join(store, "x", *runs)
    assert families(store, "x-2-r2") == [("x-2", ["x-2-r1", "x-2-r2"])]
    assert families(store, "x-1-r2", "x-2-r1", "x-1-r1") == [
        ("x-1", ["x-1-r1", "x-1-r2"]),
        ("x-2", ["x-2-r1", "x-2-r2"]),
    ]


def test_points_of_a_matrix_repeat_each_other_if_only_their_seeds_differ(store: Store) -> None:
    runs = [record(store, f"x-1-{word}") for word in ("a", "b", "c")]
    points = {
        "x-1-a": {"seed": "1", "backend": "gloo"},
        "x-1-b": {"seed": "2", "backend": "gloo"},
        "x-1-c": {"seed": "1", "backend": "mpi"},
    }
    join(store, "x", *runs, points=points)
    assert families(store, "x-1-b", "x-1-c") == [("x-1-a", ["x-1-a", "x-1-b"]), ("x-1-c", ["x-1-c"])]


def test_members_of_two_experiments_are_not_repeats(store: Store) -> None:
    one, other = record(store, "x-1"), record(store, "y-1")
    join(store, "x", one)
    join(store, "y", other)
    assert families(store, "x-1", "y-1") == [("x-1", ["x-1"]), ("y-1", ["y-1"])]


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (("x-2", "x-2-r2"), "x-2"),  # the repeats were asked for later
        (("x-2-r1", "x-2-r2-try2"), "x-2"),
        (("x-2-try3", "x-2-r1"), "x-2"),
        (("x-2", "y-2"), "x-2"),
        (("x-2-run", "x-2-r2"), "x-2-run"),
    ],
)
def test_a_family_has_the_name_that_its_runs_have_in_common(store: Store, names: tuple[str, ...], common: str) -> None:
    join(store, "x", *(record(store, name) for name in names))
    assert families(store, names[1]) == [(common, list(names))]


def test_a_member_that_was_deleted_is_left_out(store: Store) -> None:
    runs = [record(store, f"x-1-r{number}") for number in (1, 2, 3)]
    join(store, "x", *runs)
    store.forget_run(runs[1])
    assert families(store, "x-1-r1") == [("x-1", ["x-1-r1", "x-1-r3"])]


# --- runs without an experiment -------------------------------------------------------------------------------------


def test_runs_that_were_found_on_a_cluster_repeat_each_other_by_name_and_settings(store: Store) -> None:
    record(store, "x-1-r2", seed=2, created=2)
    record(store, "x-1-r1", seed=1, created=1)
    record(store, "x-1-r3", seed=3, created=3, parameters={"batch_size": 5})
    record(store, "x-12-r1", created=4)
    record(store, "x-1", created=5)
    assert families(store, "x-1-r2") == [("x-1", ["x-1-r1", "x-1-r2"])]
    assert families(store, "x-1-r3") == [("x-1", ["x-1-r3"])]
    assert families(store, "x-1-r2", "x-1", "x-1-r1") == [("x-1", ["x-1-r1", "x-1-r2"]), ("x-1", ["x-1"])]


def test_runs_with_names_of_their_own_are_no_repeats(store: Store) -> None:
    """Whatever they run."""
    for name in ("a-1", "b-1"):
        record(store, name)
    assert families(store, "a-1", "b-1") == [("a-1", ["a-1"]), ("b-1", ["b-1"])]


def test_a_run_that_cannot_be_read_stands_alone(store: Store) -> None:
    run = record(store, "x-1-r1")
    record(store, "x-1-r2")
    (family,) = find_families(store, [RunRow(run, RunState.RUNNING, None, problem="It is of a newer mlbench.")])
    assert [row.run.name for row in family.rows] == ["x-1-r1"]


def test_the_runs_of_a_name(store: Store) -> None:
    join(store, "x", record(store, "x-1"), record(store, "x-1-r2"), record(store, "x-2", 2))
    assert [run.name for run in runs_named(store, "x-1")] == ["x-1", "x-1-r2"]
    assert [run.name for run in runs_named(store, "x-1-r2")] == ["x-1-r2"]
    assert [run.name for run in runs_named(store, "x")] == ["x-1", "x-1-r2", "x-2"]


# --- results --------------------------------------------------------------------------------------------------------


def repeats(store: Store, *names: str) -> list[Any]:
    return [found.to_dict() for found in repeats_in(store, [store.run(name) for name in names])]


def test_repeats_have_a_mean_and_its_interval(store: Store) -> None:
    runs = [record_sealed(store, f"x-2-r{number}", 2, seconds) for number, seconds in ((1, 98.0), (2, 102.0))]
    runs.append(record(store, "x-2-r3", 2))
    join(store, "x", *runs)
    (found,) = repeats_in(store, [store.run("x-2-r2")])
    assert (found.name, found.total, found.metric, found.unit) == ("x-2", 3, "Prec@1", "%")
    document = found.to_dict()
    assert [*document] == [
        *("name", "workers", "repeats", "counted", "left_out", "seconds", "metric", "samples_per_second")
    ]
    assert (document["workers"], document["repeats"], document["left_out"]) == (2, 3, [])
    assert document["counted"] == ["x-2-r1", "x-2-r2"]
    seconds = document["seconds"]
    assert (seconds["count"], seconds["mean"]) == (2, 100.0)
    # The deviation of 98 and 102 is the root of 8, and that of their mean is 2.
    assert (seconds["low"], seconds["high"]) == pytest.approx((100 - 2 * T_1, 100 + 2 * T_1), rel=1e-3)
    assert (document["metric"]["name"], document["metric"]["mean"]) == ("Prec@1", 80.5)
    assert document["samples_per_second"]["mean"] > 0


def test_repeats_that_failed_are_left_out(store: Store) -> None:
    runs = [record_sealed(store, f"x-1-r{number}", 1, 50.0, word) for number, word in ((1, "failed"), (2, "failed"))]
    join(store, "x", *runs)
    (document,) = repeats(store, "x-1-r1")
    assert (document["counted"], document["left_out"]) == ([], ["x-1-r1", "x-1-r2"])
    assert (document["seconds"], document["metric"], document["samples_per_second"]) == (None, None, None)


def test_one_result_is_no_repeat(store: Store) -> None:
    join(store, "x", record_sealed(store, "x-1-r1", 1, 50.0), record(store, "x-1-r2"))
    assert repeats(store, "x-1-r1", "x-1-r2") == []


def test_a_damaged_archive_counts_as_unfinished(store: Store) -> None:
    runs = [record_sealed(store, f"x-1-r{number}", 1, 50.0) for number in (1, 2, 3)]
    join(store, "x", *runs)
    (runs[1].folder / "result.json").write_text("{}")
    (document,) = repeats(store, "x-1-r1")
    assert (document["counted"], document["repeats"]) == (["x-1-r1", "x-1-r3"], 3)


def test_repeats_under_different_settings_are_several(store: Store) -> None:
    """The code or anything else that the experiment does not fix has changed between them."""
    one = record_sealed(store, "x-1-r1", 1, 50.0)
    other = record_sealed(store, "x-1-r2", 1, 60.0, backend="mpi")
    join(store, "x", one, other)
    found = repeats(store, "x-1-r1")
    assert [item["repeats"] for item in found] == [1, 1]
    assert all(item["name"].startswith("x-1 (") for item in found)
    assert len({item["name"] for item in found}) == 2
