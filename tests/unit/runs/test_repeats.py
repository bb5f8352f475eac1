"""Which runs repeat each other, under which name, and what their repeats give together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Experiment, Member, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.families import find_families
from mlbench_cli.runs.repeats import repeats_in
from mlbench_cli.storage.store import Store
from tests.unit.results.runs import record_sealed


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


# --- runs without an experiment -------------------------------------------------------------------------------------


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
    assert (document["workers"], document["repeats"], document["left_out"]) == (2, 3, [])
    assert document["counted"] == ["x-2-r1", "x-2-r2"]
    seconds = document["seconds"]
    assert (seconds["count"], seconds["mean"]) == (2, pytest.approx((98 * 102) ** 0.5))
    assert (seconds["low"], seconds["high"]) == (None, None)  # two runs have no interval
    assert (document["metric"]["name"], document["metric"]["mean"]) == ("Prec@1", 80.5)
    assert document["samples_per_second"]["mean"] > 0
