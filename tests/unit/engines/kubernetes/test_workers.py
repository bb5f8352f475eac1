"""What is known of workers from their pods and their own last words."""

from mlbench_cli.engines.kubernetes.workers import _apply_summary
from mlbench_cli.model.run import WorkerState


def test_a_worker_whose_clock_is_behind_that_of_its_node_ends_after_it_started() -> None:
    running = WorkerState(rank=1, phase="running", started=1000.0)
    seen = _apply_summary(running, {"exit_code": 0, "reason": "exited", "started": 401.0, "ended": 476.0})
    assert (seen.started, seen.finished) == (401.0, 476.0)
    same = _apply_summary(running, {"exit_code": 0, "reason": "exited", "started": 1001.0, "ended": 1076.0})
    assert (same.started, same.finished) == (1000.0, 1076.0)
