"""Find runs that repeat each other: in the store, members of one experiment with equal size and matrix point."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mlbench_cli.model.run import Experiment, Run, RunRow
from mlbench_cli.model.spec import canonical_json, common_name
from mlbench_cli.storage.store import Store

_SEED = "seed"  # the matrix axis whose values make repeats
_SUFFIX = re.compile(r"(-r\d+)?(-try\d+)?$")

_Key = tuple[str, str]


class Family(NamedTuple):
    """Runs that repeat each other, in the order in which they were asked for. `name` stands for all of them: "x-2" for
    x-2-r1 and x-2-r2, and for x-2 and x-2-r2 if the repeats were asked for later."""

    name: str
    rows: tuple[RunRow, ...]


def find_families(store: Store, rows: Iterable[RunRow]) -> list[Family]:
    """The families of some runs in the order of the rows. Each is whole, also if `rows` has only some of its runs."""
    rows = list(rows)
    found: dict[_Key, dict[str, RunRow]] = {}
    known = {row.run.id: row for row in rows}
    keys: dict[str, _Key] = {}
    for experiment in store.experiments_of(list(known)):
        shown = {_without_seed(member.point) for member in experiment.members if member.run_id in known}
        for member in experiment.members:
            row = known.get(member.run_id)
            if row is None and _without_seed(member.point) in shown:  # the rest of thousands repeats none of them
                row = store.find_run(member.run_id)
            if row is not None:
                keys[row.run.id] = key = _key_of_member(experiment, row.run, member.point)
                found.setdefault(key, {})[row.run.id] = row
    families: dict[_Key, dict[str, RunRow]] = {}
    for row in rows:
        key = keys.get(row.run.id) or _key_alone(row.run)
        families.setdefault(key, found[key] if key in found else _find_alike(store, row, key))
    return [Family(_name_of(list(each.values())), tuple(each.values())) for each in families.values()]


def _key_of_member(experiment: Experiment, run: Run, point: Mapping[str, str]) -> _Key:
    return experiment.id, canonical_json([run.spec.workers, sorted(_without_seed(point))]).decode()


def _without_seed(point: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in point.items() if item[0] != _SEED)


def _key_alone(run: Run) -> _Key:
    """The key of a run without an experiment, such as one found on a cluster: its settings and its common name."""
    common = common_name(run.name)
    if common is None:
        return run.id, ""
    content = {name: value for name, value in run.spec.content().items() if name != _SEED}
    return common, canonical_json(content).decode()


def _find_alike(store: Store, row: RunRow, key: _Key) -> dict[str, RunRow]:
    common = common_name(row.run.name)
    if common is None or row.problem:
        return {row.run.id: row}
    near = sorted(store.iterate_runs(contains=f"{common}-r"), key=lambda other: other.run.created)
    alike = {other.run.id: other for other in near if not other.problem and _key_alone(other.run) == key}
    return alike or {row.run.id: row}


def _name_of(rows: list[RunRow]) -> str:
    names = {_SUFFIX.sub("", row.run.name) for row in rows}
    return names.pop() if len(names) == 1 else rows[0].run.name
