"""Completing a run's archive, with an engine that plays what it is given."""

from pathlib import Path

import pytest

from mlbench_cli.engines.base import Fetched
from mlbench_cli.model.run import Ending, Finding, Observation, Phase, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.runs.finalize import finalize
from mlbench_cli.storage.store import Store
from tests.fakes.engine import FakeEngine

REASON = Finding("results_lost", "The head lost the output of worker 0.", hint="Run it again.")


@pytest.mark.parametrize(
    ("findings", "codes"),
    [((), ["output_lost"]), ((REASON,), ["results_lost"]), ((Finding("log_gap", "x"),), ["output_lost", "log_gap"])],
)
def test_a_loss_is_said_once_by_who_knows_why(tmp_path: Path, findings: tuple[Finding, ...], codes: list[str]) -> None:
    store = Store(tmp_path)
    run = store.record_run(RunSpec("r-1", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 1))
    write_run_document(run, None)
    ended = Observation(1.0, (WorkerState(0, Phase.SUCCEEDED, exit_code=0),), ended=Ending.EXITED)
    engine = FakeEngine([ended])
    engine.fetched = Fetched(0, 0, complete=False, findings=findings)
    finished = finalize(run, engine, store)
    assert finished is not None
    assert [finding.code for finding in finished.findings] == codes
