"""What is left of an experiment: what is skipped, started once more, added, or refused; and its state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import LOCAL, Experiment, Outcome, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.experiment import (
    Candidate,
    MemberRow,
    Plan,
    expand,
    make_plan,
    next_attempt,
    request_of,
)
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.request import Request, request_document

MACHINE = Machine(cores=4, gpus=0)
EMPTY = Experiment("e", "demo", "2026-01-01T00:00:00.000Z", {})


def ask(**options: Any) -> tuple[Candidate, ...]:
    request = Request(**{"name": "demo", "workers": (1, 2), "command": "true", "num_cpus": 2, **options})
    return expand(request, LOCAL, MACHINE)


class Recorder:
    """Makes runs with ids "0", "1", ... and answers as a store of their outcomes."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.outcomes: dict[str, Outcome | None] = {}

    def make(self, spec: RunSpec) -> Run:
        self.runs.append(Run(str(len(self.runs)), spec, Path("nowhere"), EMPTY.created))
        return self.runs[-1]

    def plan(self, known: Plan | None, candidates: Sequence[Candidate], **options: bool) -> Plan:
        experiment = known.experiment if known else EMPTY
        rows = [
            MemberRow(member, self.runs[int(member.run_id)], self.outcomes.get(member.run_id))
            for member in experiment.members
        ]
        return make_plan(experiment, rows, candidates, self.make, **options)

    def end(self, plan: Plan, **outcomes: Outcome) -> None:
        for run in plan.left:
            self.outcomes[run.id] = outcomes.get(run.name.replace("-", "_"), Outcome.COMPLETED)


def names(runs: Sequence[Run]) -> list[str]:
    return [run.name for run in runs]


@pytest.fixture
def store() -> Recorder:
    return Recorder()


# --- going on --------------------------------------------------------------------------------------------------------


def test_the_same_again_leaves_nothing_to_do(store: Recorder) -> None:
    first = store.plan(None, ask())
    assert names(first.new) == names(first.left) == names(first.runs) == ["demo-1", "demo-2"]
    store.end(first)
    again = store.plan(first, ask())
    assert (again.new, again.left, again.experiment) == ((), (), first.experiment)
    assert names(again.done) == ["demo-1", "demo-2"]


def test_what_was_not_started_is_left_and_what_was_interrupted_starts_once_more(store: Recorder) -> None:
    first = store.plan(None, ask(workers=(1, 2, 3)))
    store.outcomes = {"0": Outcome.COMPLETED, "1": Outcome.CANCELED, "2": None}
    again = store.plan(first, ask(workers=(1, 2, 3)))
    assert names(again.left) == ["demo-2-try2", "demo-3"]
    assert names(again.new) == ["demo-2-try2"]
    assert [store.runs[int(member.run_id)].name for member in again.experiment.members] == [
        *("demo-1", "demo-2-try2", "demo-3")
    ]
    assert again.left[0].spec.content_hash == first.left[1].spec.content_hash
    store.outcomes["3"] = Outcome.CANCELED
    assert names(store.plan(again, ask(workers=(1, 2, 3))).new) == ["demo-2-try3"]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_failed_ones_stay_failed_unless_they_are_retried(store: Recorder, outcome: Outcome) -> None:
    first = store.plan(None, ask())
    store.end(first, demo_2=outcome)
    expected = ["demo-2-try2"] if outcome.is_resumable else []
    assert names(store.plan(first, ask()).left) == expected
    expected = [] if outcome.is_success else ["demo-2-try2"]
    assert names(store.plan(first, ask(), retry_failed=True).left) == expected


def test_more_repeats_are_added_also_to_a_run_that_had_none(store: Recorder) -> None:
    first = store.plan(None, ask(repeat=3))
    store.end(first)
    more = store.plan(first, ask(repeat=5))
    assert names(more.left) == ["demo-1-r4", "demo-2-r4", "demo-1-r5", "demo-2-r5"]
    assert [run.spec.seed for run in more.left] == [45, 45, 46, 46]
    assert [member.index for member in more.experiment.members] == list(range(10))
    single = store.plan(None, ask())
    store.end(single)
    assert names(store.plan(single, ask(repeat=2)).runs) == ["demo-1", "demo-2", "demo-1-r2", "demo-2-r2"]


def test_further_sizes_and_further_values_of_a_matrix_are_added(store: Recorder) -> None:
    first = store.plan(None, ask(matrix={"backend": ("gloo",)}))
    more = store.plan(first, ask(matrix={"backend": ("mpi", "gloo")}, workers=(1, 2, 3)))
    assert names(more.new) == ["demo-mpi-1", "demo-mpi-2", "demo-mpi-3", "demo-gloo-3"]
    others = more.experiment.members[1:]  # the first was deleted
    left = replace(more, experiment=replace(more.experiment, members=others))
    fourth = store.plan(left, ask(matrix={"backend": ("mpi", "gloo")}, workers=(4,)))
    assert fourth.experiment.members[:-2] == others


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"backend": "mpi"}, 'backend was "gloo", now "mpi"'),
        ({"command": "false"}, "command was"),
        ({"timeout": "90s"}, "timeout was 14400.0, now 90.0"),
        ({"workers": (3,), "backend": "mpi"}, 'backend was "gloo"'),
        ({"matrix": {"backend": ("gloo", "mpi")}}, "the matrix"),
    ],
)
def test_a_differing_request_is_refused_with_the_difference(
    store: Recorder, options: dict[str, Any], difference: str
) -> None:
    first = store.plan(None, ask())
    with pytest.raises(UsageError) as caught:
        store.plan(first, ask(**options))
    assert difference in caught.value.message
    assert "mlbench run demo" in str(caught.value.hint)


def test_a_size_that_would_leave_fewer_cores_is_refused_with_the_option_that_keeps_them(store: Recorder) -> None:
    first = store.plan(None, ask(workers=(1,), num_cpus=4))
    with pytest.raises(UsageError, match=r"cpus was 4") as caught:
        store.plan(first, ask(workers=(1, 2)))
    assert str(caught.value.hint).endswith("cores of the existing runs: --num-cpus 4")
    assert names(store.plan(first, ask(workers=(1, 2), num_cpus=4)).new) == ["demo-2"]
    with pytest.raises(UsageError) as caught:
        store.plan(first, ask(workers=(1, 2), backend="mpi"))
    assert "--num-cpus" not in str(caught.value.hint)


EFTOPK: dict[str, Any] = {"command": None, "task": "digits_resnet", "preset": "tiny", "method": "eftopk"}


@pytest.mark.parametrize(
    ("options", "axis", "values", "change"),
    [
        ({"command": "true --lr {lr}"}, "set.lr", (1, 2, 3), {"command": "true --fast --lr {lr}"}),
        ({"command": "sh -c 'echo $MLBENCH_PARAMETERS'"}, "set.lr", (1, 2, 3), {"set": {"decay": 1}}),
        (EFTOPK, "set.comm.density", ("0.1", "0.2", "0.3"), {"set": {"epochs": 2}}),
        (EFTOPK, "set.batch_size", (16, 32, 64), {"set": {"comm.density": "0.1"}}),
    ],
)
def test_a_setting_of_the_matrix_gets_further_values_and_nothing_else_changes(
    store: Recorder, options: dict[str, Any], axis: str, values: tuple[Any, ...], change: dict[str, Any]
) -> None:
    first = store.plan(None, ask(**options, matrix={axis: values[:2]}))
    assert len(store.plan(first, ask(**options, matrix={axis: values})).new) == 2
    with pytest.raises(UsageError, match="differs from this request"):
        store.plan(first, ask(**options | change, matrix={axis: values[2:]}))


def test_attempts_are_counted() -> None:
    assert next_attempt("x-2") == "x-2-try2"
    assert next_attempt("x-2-r1-try9") == "x-2-r1-try10"
    with pytest.raises(UsageError, match="too long to append"):
        next_attempt("x" * 38)


def test_a_recorded_request_gives_the_same_runs_again() -> None:
    request = Request(name="demo", workers=(1,), command="true", matrix={"set.a": (1, "2")}, exclude=({"set.a": 2},))
    experiment = replace(EMPTY, request=request_document(request))
    assert request_of(experiment) == request
