"""Resolve names of runs and experiments, and filters, to the runs that a command acts on."""

import time
from collections.abc import Iterable, Sequence

from msgspec import Struct

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.run import Experiment, Outcome, RunRow, RunState
from mlbench_cli.model.spec import common_name
from mlbench_cli.runs.families import Family, find_families
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import parse_timestamp

PENDING = "pending"  # queued or submitted, as experiments say it
STATES = (PENDING, *(str(state) for state in RunState), *(str(outcome) for outcome in Outcome))


class Filter(Struct, frozen=True):
    """Which runs to keep. `states` are states or outcomes; ages are in seconds since the run was recorded."""

    states: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    older_than: float | None = None
    newer_than: float | None = None

    def __post_init__(self) -> None:
        for state in self.states:
            if state not in STATES:
                raise UsageError(
                    f'--state "{state[:60]}": no such state or outcome.{did_you_mean(state, STATES)}',
                    hint=", ".join(STATES),
                )

    def __bool__(self) -> bool:
        return bool(self.states or self.tasks or self.older_than is not None or self.newer_than is not None)

    def keeps(self, row: RunRow, moment: float) -> bool:
        """Whether the filter keeps a run at `moment`, in seconds since 1970."""
        if self.states and not {str(row.state), str(row.outcome)} & self.words:
            return False
        if self.tasks and row.run.spec.task not in self.tasks:
            return False
        if self.older_than is None and self.newer_than is None:
            return True
        age = moment - parse_timestamp(row.run.created)
        is_old = self.older_than is None or age >= self.older_than
        return is_old and (self.newer_than is None or age <= self.newer_than)

    @property
    def words(self) -> set[str]:
        """The states as the store has them."""
        pending = {str(RunState.QUEUED), str(RunState.SUBMITTED)} if PENDING in self.states else set()
        return pending | {state for state in self.states if state != PENDING}


def select(
    store: Store,
    names: Sequence[str] = (),
    *,
    all_runs: bool = False,
    filter: Filter | None = None,
    readable: bool = True,
    repeats: bool = False,
) -> tuple[list[RunRow], list[Experiment]]:
    """The named runs, or all, that pass the filter, once each and in the order of the names; and the experiments that
    were named as a whole.

    A name is that of a run, of an experiment, or what repeats have in common; see `find` for `repeats`. Raises
    NotFoundError with the nearest name; UsageError if nothing says which runs are meant or, with `readable`, for a run
    that a newer mlbench wrote.
    """
    filter = filter or Filter()
    if names and all_runs:
        raise UsageError("--all selects every run and cannot be combined with names.", hint="Or remove --all.")
    if not names and not all_runs and not filter:
        raise UsageError("No run given.", hint="Name a run or an experiment (mlbench status), or use --all")
    moment = time.time()
    experiments: list[Experiment] = []
    rows: dict[str, RunRow] = {}
    if names:
        for name in dict.fromkeys(names):
            found, experiment = find(store, name, repeats=repeats)
            rows |= {row.run.id: row for row in found}
            experiments += [] if experiment is None else [experiment]
    else:
        rows = {row.run.id: row for row in store.runs()}
        experiments = store.experiments() if all_runs and not filter else []
    kept = [row for row in rows.values() if filter.keeps(row, moment)]
    if readable:
        kept = list(_readable(kept, skip=not names))
    return kept, [] if filter else experiments


def find(store: Store, name: str, *, repeats: bool = False) -> tuple[list[RunRow], Experiment | None]:
    """The runs that a name stands for, and the experiment if it names one. Raises NotFoundError with the nearest.

    A run whose name stands for its repeats, too (`x-1` beside `x-1-r2`), is meant alone unless `repeats`: results are
    those of all repeats, and a log is that of one run.
    """
    try:
        row = store.run(name, readable=False)
    except NotFoundError:
        pass
    else:
        (family,) = find_families(store, [row]) if repeats and not row.problem else [Family(name, (row,))]
        return list(family.rows) if family.name == name else [row], None
    if (experiment := store.find_experiment(name)) is not None:
        return store.members(experiment), experiment
    rows = (row for row in store.run_family(name) if not row.problem)
    if found := next((each for each in find_families(store, rows) if each.name == name), None):
        return list(found.rows), None
    runs = store.near_names(name)
    known = [*runs, *(item.name for item in store.experiments())]
    families = [common for run in runs if (common := common_name(run))]
    near = did_you_mean(name, list(dict.fromkeys([*known, *families])))
    raise NotFoundError(f'There is no run or experiment "{name[:60]}".{near}', hint="mlbench status")


def one_run(store: Store, name: str) -> RunRow:
    """The run of that name, or the only one of an experiment. Raises UsageError if there are several."""
    rows, experiment = find(store, name)
    (row,) = _readable(rows[:1], skip=False)
    if len(rows) > 1:
        kind = "experiment" if experiment else "name"
        raise UsageError(f'The {kind} "{name}" stands for {len(rows)} runs.', hint=f"Name one of them: {row.run.name}")
    return row


def _readable(rows: Iterable[RunRow], *, skip: bool) -> Iterable[RunRow]:
    for row in rows:
        if row.problem and not skip:
            raise UsageError(
                f'The run "{row.run.name}" cannot be read: {row.problem}',
                hint=f"Upgrade mlbench, or: mlbench delete {row.run.name}",
            )
        if not row.problem:
            yield row
