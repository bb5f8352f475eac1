"""Starting the members of an experiment: followed one after the other by this client, or left to a queue."""

from collections.abc import Callable

from mlbench_cli import console
from mlbench_cli.commands._common import Format
from mlbench_cli.commands._report import Ended, Reporter, in_words
from mlbench_cli.engines.base import Engine
from mlbench_cli.errors import MlbenchError, Stopped, explain_stop
from mlbench_cli.model import Outcome, Run
from mlbench_cli.runs import queue
from mlbench_cli.runs.experiment import Plan
from mlbench_cli.runs.finished import FinishedRun, read_finished
from mlbench_cli.runs.queue import HeldQueue
from mlbench_cli.store import Store

EngineOf = Callable[[Run], Engine]
STOP_SECONDS = 1.0  # in which a stopped client waits for the end of a run that it cancels

# --- left to a queue ------------------------------------------------------------------------------------------------


def start_detached(plan: Plan, engines: EngineOf, store: Store, held: HeldQueue, output: Format) -> int:
    """Start what is left of an experiment and return. Several runs at a time are few enough to submit them at once."""
    experiment, left = plan.experiment, plan.left
    die_with_client = any(engines(run).dies_with_client for run in left)
    waits = len(left) == 1 and left[0].spec.engine == "local" and _waits_for_machine(left[0])
    if (len(left) == 1 and not waits) or (not die_with_client and experiment.parallel >= len(left)):
        _submit_all(plan, engines, store)
    elif left:
        pid = queue.start(experiment, left, store.folder, held)
        console.note(
            f"Runs recorded with names {', '.join(run.name for run in left)}. Process {pid} of this machine starts "
            f"{'them one after the other' if experiment.parallel == 1 else f'{experiment.parallel} at a time'}; "
            f"if it ends early, the same command line goes on."
        )
    if output == Format.json:
        runs = [{"name": run.name, "id": run.id, "folder": str(run.folder)} for run in left]
        console.out_json({"experiment": experiment.name, "runs": runs})
    elif left:
        console.out("\n".join(run.name for run in left))
    name = left[0].name if len(plan.runs) == 1 and left else experiment.name
    console.note(f"Next: mlbench status {name}, mlbench logs {name}, mlbench wait {name}, mlbench cancel {name}")
    return 0


def _waits_for_machine(run: Run) -> bool:
    """Whether a local run cannot start at once because another one has this machine; says which."""
    from mlbench_cli.engines.local.machine_lock import find_holder

    holder = None if run.spec.share_machine else find_holder()
    if holder is not None:
        console.note(f"{run.name} waits for this machine: {holder.phrase}.")
    return holder is not None


def _submit_all(plan: Plan, engines: EngineOf, store: Store) -> None:
    for run in plan.left:
        _submit(plan, run, engines(run), store, detach=True)
        console.note(f"Run started with name {run.name}")
        _announce_keeping(run)


def _submit(plan: Plan, run: Run, engine: Engine, store: Store, *, detach: bool) -> None:
    try:
        queue.start_member(plan.experiment, run, engine, store, detach=detach)
    except MlbenchError:
        console.note(
            f"{run.name} stays recorded, with what there may be of it. The same command line tries again; to forget "
            f"it: mlbench delete {run.name}"
        )
        raise


# --- followed by this client ----------------------------------------------------------------------------------------


def follow_all(plan: Plan, engines: EngineOf, store: Store, *, require_goal: bool, logs: bool = False) -> list[Ended]:
    """Start and follow what is left, one after the other; all runs of the plan as they ended, in its order."""
    ended: dict[str, FinishedRun] = {}
    for run in plan.done:
        if (known := read_finished(run)) is not None:
            ended[run.id] = known
    for number, run in enumerate(plan.left):
        ended[run.id] = _follow(plan, run, plan.left[number + 1 :], engines(run), store, logs)
    found = [ended[run.id] for run in plan.runs if run.id in ended]
    return [Ended(finished, finished.exit_code(require_goal=require_goal)) for finished in found]


def wait_for_queue(plan: Plan, engines: EngineOf, store: Store, held: HeldQueue, *, require_goal: bool) -> list[Ended]:
    """As `follow_all`, for several runs at a time: a queue of its own starts them, and outlives this client."""
    from mlbench_cli.runs import supervise

    pid = queue.start(plan.experiment, plan.left, store.folder, held)
    console.note(
        f"Process {pid} of this machine starts {len(plan.left)} runs, {plan.experiment.parallel} at a time. "
        "Ctrl-C ends only the waiting."
    )
    ended = []
    for run in plan.runs:
        try:
            with Reporter(run) as report:
                finished = supervise.follow(run, engines(run), store, report=report, notice=console.note)
        except (KeyboardInterrupt, Stopped) as stopped:
            raise explain_stop(
                stopped,
                f'The experiment "{plan.experiment.name}" goes on without this client.',
                f"mlbench wait {plan.experiment.name}, or mlbench cancel {plan.experiment.name}",
            ) from None
        ended.append(Ended(finished, finished.exit_code(require_goal=require_goal)))
    return ended


def _follow(plan: Plan, run: Run, later: tuple[Run, ...], engine: Engine, store: Store, logs: bool) -> FinishedRun:
    from mlbench_cli.runs import supervise

    try:
        if read_finished(run) is None:
            _submit(plan, run, engine, store, detach=False)
            _announce(run, engine)
        with Reporter(run, engine if logs else None) as report:
            finished = supervise.follow(run, engine, store, report=report, notice=console.note)
        if later:
            console.note(finished.summary)
        return finished
    except (KeyboardInterrupt, Stopped) as stopped:
        raise _stop(plan, run, engine, store, later, stopped) from None


def _announce(run: Run, engine: Engine) -> None:
    interrupt = "cancels it and keeps what there is" if engine.dies_with_client else "leaves it running"
    console.note(f"Run started with name {run.name}: {in_words(run.spec)}.")
    if run.spec.functional_only:
        console.note(f"Its result is functional, not a performance measurement: {run.spec.functional_only}.")
    console.note(f"Ctrl-C {interrupt}. It is stopped after {console.duration(run.spec.timeout)}.")
    _announce_keeping(run)


def _announce_keeping(run: Run) -> None:
    """Until when the results can be fetched, of a run that a cluster executes."""
    options = run.spec.kubernetes
    if run.spec.engine != "kubernetes":
        return
    if options.keep_seconds:
        console.note(f"The cluster keeps its results for {console.duration(options.keep_seconds)} after its end.")
    else:
        console.note(f"Its workers hold its results for {console.duration(options.hold_seconds)} after its end.")


def _stop(
    plan: Plan, run: Run, engine: Engine, store: Store, later: tuple[Run, ...], stopped: BaseException
) -> Stopped:
    """What is true of a run whose client was stopped: it had ended, it is cancelled with its client, or it goes on."""
    from mlbench_cli.runs import supervise

    names = ", ".join(item.name for item in later)
    never = f" Not started: {names}; to go on: mlbench run {plan.experiment.name}" if later else ""
    if (finished := read_finished(run)) is not None:
        return explain_stop(
            stopped, f"{finished.summary} Its archive is complete.{never}", f"mlbench status {run.name}"
        )
    if not engine.dies_with_client:
        return explain_stop(
            stopped,
            f'The run "{run.name}" goes on without this client.{never}',
            f"mlbench wait {run.name}, mlbench status {run.name}, or mlbench cancel {run.name}",
        )
    console.note(f"Cancelling {run.name} ...")
    finished = supervise.cancel(run, engine, store, seconds=STOP_SECONDS)
    if finished is None:
        return explain_stop(
            stopped,
            f'The run "{run.name}" is being cancelled; its archive follows.{never}',
            f"mlbench status {run.name}",
        )
    if finished.outcome is not Outcome.CANCELLED:
        return explain_stop(
            stopped, f"{finished.summary} Its archive is complete.{never}", f"mlbench status {run.name}"
        )
    return explain_stop(
        stopped,
        f'The run "{run.name}" was cancelled; partial results are in {run.folder}.{never}',
        f"mlbench logs {run.name}, or mlbench delete {run.name}",
    )
