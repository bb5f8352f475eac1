"""Start the members of an experiment: followed one by one by this client, or handed to a queue."""

from collections.abc import Sequence
from typing import NamedTuple

from mlbench_cli import console
from mlbench_cli.api import FinishedRun, OpenExperiment, RunHandle
from mlbench_cli.commands._common import Format
from mlbench_cli.commands._report import Ended, Reporter, in_words
from mlbench_cli.errors import DeadlineError, MlbenchError, Stopped, explain_stop
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Outcome, Run
from mlbench_cli.model.spec import MIN_KEEP_SECONDS
from mlbench_cli.results.analysis.numbers import format_price
from mlbench_cli.runs.connect import find_machine_holder
from mlbench_cli.runs.own_command import find_interpreter
from mlbench_cli.util.text import counted

STOP_SECONDS = 1.0  # time that a stopped client waits for a run that it cancels


class How(NamedTuple):
    """Options for how runs are started and reported."""

    dry_run: bool
    detach: bool
    retry_failed: bool
    logs: bool
    output: Format
    command_line: tuple[str, ...]


# --- started by a queue ---------------------------------------------------------------------------------------------


def start_detached(opened: OpenExperiment, output: Format) -> int:
    """Start the remaining runs of an experiment and return. Several runs at a time are few enough to submit them at
    once.
    """
    experiment, left = opened.plan.experiment, opened.left
    waits = len(left) == 1 and _waits_for_machine(left[0])
    if (len(left) == 1 and not waits) or (not opened.runs_here and experiment.parallel >= len(left)):
        _submit_all(opened, left)
    elif left:
        pid = opened.hand_over()
        console.note(
            f"Queued {', '.join(run.name for run in left)}. Background process {pid} starts "
            f"{'them one after the other' if experiment.parallel == 1 else f'{experiment.parallel} at a time'}; "
            f"if it dies, repeat the command to resume."
        )
    if output == Format.json:
        runs = [{"name": run.name, "id": run.run.id, "folder": str(run.folder)} for run in left]
        console.out_json({"experiment": experiment.name, "runs": runs})
    elif left:
        console.out("\n".join(run.name for run in left))
    name = left[0].name if len(opened.plan.runs) == 1 and left else experiment.name
    console.next_step(f"mlbench status {name}", f"mlbench wait {name}", f"mlbench cancel {name}")
    return 0


def _waits_for_machine(run: RunHandle) -> bool:
    """Whether a local run has to wait because another run uses this machine; prints which one."""
    holder = find_machine_holder(run.run.spec)
    if holder is not None:
        console.note(f"{run.name} is waiting for this machine: {holder}.")
    return holder is not None


def _submit_all(opened: OpenExperiment, left: Sequence[RunHandle]) -> None:
    for run in left:
        _submit(opened, run)
        console.note(f"Started {run.name}. Timeout {_limit(run.run)}.")
        for note in _describe_keeping(opened, run.run):
            console.note(note)


def _submit(opened: OpenExperiment, run: RunHandle) -> None:
    try:
        opened.start_run(run)
    except MlbenchError:
        console.note(f"Repeat the command to try again, or discard the run: mlbench delete {run.name}")
        raise


# --- followed by this client ----------------------------------------------------------------------------------------


def follow_all(opened: OpenExperiment, *, logs: bool = False) -> list[Ended]:
    """Start and follow the remaining runs. Returns all runs of the plan as they ended, in order."""
    left, experiment = opened.left, opened.plan.experiment
    if experiment.parallel > 1 and len(left) > 1 and not opened.runs_here:
        found = _wait_for_queue(opened)
    else:
        said: set[str] = set()
        ended = {run.run.id: follow_run(opened, run, left[at + 1 :], said, logs=logs) for at, run in enumerate(left)}
        found = [end for run in opened.runs if (end := ended.get(run.run.id) or run.finished) is not None]
    return [Ended(item, item.exit_code(require_goal=experiment.require_goal)) for item in found]


def _wait_for_queue(opened: OpenExperiment) -> list[FinishedRun]:
    """For several runs at a time: a separate queue process starts them and outlives this client."""
    pid = opened.hand_over()
    console.note(
        f"Background process {pid} starts {counted(len(opened.left), 'run')}, "
        f"{opened.plan.experiment.parallel} at a time. Ctrl-C stops waiting, not the runs."
    )
    ended = []
    for run in opened.runs:
        try:
            with Reporter(run) as report:
                ended.append(run.wait(report=report))
        except (KeyboardInterrupt, Stopped) as stopped:
            raise explain_stop(
                stopped,
                f'The experiment "{opened.name}" continues without this client.',
                f"mlbench wait {opened.name}, or mlbench cancel {opened.name}",
            ) from None
    return ended


def follow_run(
    opened: OpenExperiment,
    run: RunHandle,
    later: Sequence[RunHandle] = (),
    said: set[str] | None = None,
    *,
    logs: bool = False,
) -> FinishedRun:
    """Start a run and follow it until it ends. If the client is stopped, it says what happens to this run and to those
    `later`. Notes that were `said` before are not repeated.
    """
    try:
        if not run.is_finished:
            _submit(opened, run)
            _announce(opened, run, set() if said is None else said)
        with Reporter(run, shows_log=logs) as report:
            finished = run.wait(report=report)
        if later:
            console.note(finished.summary)
        return finished
    except (KeyboardInterrupt, Stopped) as stopped:
        raise _stop(opened, run, later, stopped) from None


def _announce(opened: OpenExperiment, handle: RunHandle, said: set[str]) -> None:
    run = handle.run
    interrupt = "cancels the run and keeps partial results" if handle.runs_here else "leaves the run alone"
    notes = [f"Started {run.name}: {in_words(run.spec)}."]
    if run.spec.engine == "local" and (program := find_interpreter(run.spec.argv)) and not run.spec.runs_task_program:
        notes.append(f"Interpreter: {program}")
    if run.spec.functional_only:
        notes.append(f"The result is functional, not a performance measurement: {run.spec.functional_only}.")
    notes.append(f"Timeout {_limit(run)}. Ctrl-C {interrupt}.")
    notes += _describe_keeping(opened, run)
    for note in notes:
        if note not in said:
            console.note(note)
    said.update(notes)


def _limit(run: Run) -> str:
    """ "4 h (at most 6.00 USD)": the timeout of a run, and what its cluster costs until then, if that is known."""
    limit, each = console.duration(run.spec.timeout), run.spec.price.get("per_hour")
    if each:
        limit = f"{limit} (at most {format_price(each * run.spec.timeout / 3600, str(run.spec.price['currency']))})"
    return f"{limit} from the start of its job; Slurm's queue has none" if run.spec.engine == "slurm" else limit


def _describe_keeping(opened: OpenExperiment, run: Run) -> list[str]:
    """Until when the results of a cluster run can be fetched; nothing about a cluster that is deleted after its runs,
    because they are fetched before."""
    if run.spec.engine != "kubernetes":
        return []
    details = ClusterDetails.of(opened.workspace.store.cluster(run.spec.cluster))
    if details.made_for and not details.is_kept:
        return []
    kept = max(MIN_KEEP_SECONDS, run.spec.pods.keep_seconds)
    return [f"The cluster keeps the results for {console.duration(kept)} after the run."]


def _stop(opened: OpenExperiment, run: RunHandle, later: Sequence[RunHandle], stopped: BaseException) -> Stopped:
    """The state of a run whose client was stopped: ended, canceled if it is on this machine, or continuing."""
    names = ", ".join(item.name for item in later)
    never = f" Not started: {names}; to resume: mlbench run {opened.name}" if later else ""
    if (finished := run.finished) is not None:
        return explain_stop(
            stopped, f"{finished.summary} Its archive is complete.{never}", f"mlbench status {run.name}"
        )
    if not run.runs_here:
        return explain_stop(
            stopped,
            f'The run "{run.name}" continues without this client.{never}',
            f"mlbench wait {run.name}, mlbench status {run.name}, or mlbench cancel {run.name}",
        )
    try:
        finished = run.cancel(STOP_SECONDS)
    except DeadlineError:
        return explain_stop(
            stopped,
            f'Canceling the run "{run.name}"; its archive follows.{never}',
            f"mlbench status {run.name}",
        )
    if finished.outcome is not Outcome.CANCELED:
        return explain_stop(
            stopped, f"{finished.summary} Its archive is complete.{never}", f"mlbench status {run.name}"
        )
    return explain_stop(
        stopped,
        f'Canceled the run "{run.name}"; partial results are in {run.folder}.{never}',
        f"mlbench run {opened.name}, or mlbench delete {run.name}",
    )
