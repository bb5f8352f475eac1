"""What `status` shows of an experiment: its state, its queue, and how far its members are."""

from mlbench_cli import console
from mlbench_cli.model.run import ExperimentState
from mlbench_cli.runs.experiment_status import ExperimentStatus
from mlbench_cli.runs.snapshot import RunStatus
from mlbench_cli.storage.queue_folder import read_queued


def show_experiment(status: ExperimentStatus, verbose: bool) -> None:
    """A few lines on stdout; with `verbose` also the end of the queue's log."""
    counts = f"{status.finished} of {status.total} runs finished" + (
        f", {status.failed} failed" if status.failed else ""
    )
    left = "" if status.eta is None else f", about {console.duration(status.eta)} left"
    facts = [("Experiment", status.name), ("State", f"{status.state}, {counts}{left}"), ("Queue", status.queue_text)]
    if status.experiment.require_goal:
        facts.append(("Goal", "required of every run"))
    console.out("\n".join(f"{title + ':':<12}{console.clean(text)}" for title, text in facts if text))
    if verbose and status.log:
        console.out("\n".join(f"  | {console.clean(line)}" for line in status.log))
    console.out("")
    if status.state is ExperimentState.STOPPED:
        console.note(f"Next: mlbench run {status.name} or repeat the command to resume")


def is_queue_problem(status: RunStatus) -> bool:
    """Whether what is wrong with a run is that nobody starts it: its experiment says so already."""
    return read_queued(status.row.run.folder) is not None
