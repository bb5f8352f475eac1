"""`mlbench plan`: the cheapest or fastest way to a task's goal over clouds, machines, workers, methods, batch sizes."""

import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from mlbench_cli import api, console
from mlbench_cli.api.calibrated import make_question, open_archives, open_run
from mlbench_cli.commands._archives import Unproven
from mlbench_cli.commands._common import Format, Output, complete_runs
from mlbench_cli.commands._quotas import RELEASE, creation_command, leave_out_refused
from mlbench_cli.config.settings import data_dir
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.run import JsonObject
from mlbench_cli.predict.machines import HERE, MachineType, load_machines
from mlbench_cli.predict.plan import (
    Candidate,
    Excluded,
    Offer,
    PlanResult,
    Question,
    count_bases,
    explain,
    find_sensitivities,
    make_plan,
)
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.plans import draw_plan
from mlbench_cli.runs.request import Request, request_document
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import load_catalog
from mlbench_cli.util.durations import parse_duration
from mlbench_cli.util.files import write_atomically
from providers import pricing, registry
from task_images.harness.cores import effective_cores

CLOUDS = (*registry.PAID, HERE)
SHOWN = 12  # rows of the Pareto line


def plan(
    task: Annotated[str, typer.Argument(metavar="TASK", help="task of the catalog")],
    goal: Annotated[
        str | None, typer.Option("--goal", metavar="full|light", help="goal of the task; default: the calibrated run's")
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="run to predict from, repeatable; the first must be calibrated; default: all of the task",
            autocompletion=complete_runs,
        ),
    ] = None,
    max_price: Annotated[
        float | None, typer.Option("--max-price", min=0.0, metavar="USD", help="maximum price")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="DURATION", help="maximum time, e.g. 2h")
    ] = None,
    clouds: Annotated[
        str, typer.Option("--clouds", metavar="NAME,NAME", help="gke, eks, aks, here; default: all")
    ] = ",".join(CLOUDS),
    region: Annotated[
        list[str] | None, typer.Option("--region", help="only this region; repeatable; default: all with prices")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="also spot machines, where their price is known")] = False,
    interruptions: Annotated[
        float,
        typer.Option("--interruptions", min=0.0, metavar="RATE", help="interruptions of a spot machine per hour"),
    ] = 0.05,
    workers: Annotated[
        str, typer.Option("--workers", metavar="N,N", help="numbers of workers to compare")
    ] = "1,2,4,8,16,32",
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME,NAME|any",
            help="methods to compare; default: the method of the run and three others",
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", metavar="X,X", help="batch sizes per rank, as multiples of the calibrated one")
    ] = "0.5,1,2,4",
    price_here: Annotated[
        float, typer.Option("--price-here", min=0.0, metavar="USD", help="price of this machine for an hour")
    ] = 0.0,
    charts: Annotated[
        Path | None, typer.Option("--charts", metavar="FOLDER", help="draw time against price into this folder")
    ] = None,
    measure: Annotated[
        int,
        typer.Option("--measure", min=0, max=20, metavar="N", help="run the N best for this machine, and compare"),
    ] = 0,
    check_quotas: Annotated[
        bool,
        typer.Option("--check-quotas", help="ask the clouds whether the best are allowed now; needs credentials"),
    ] = False,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Plan a training to its goal: which machines, how many, which method and batch size, at what time and price.

    Every figure has a basis (measured, published or guessed) and an interval. Nothing is started without --measure.
    """
    begun = time.monotonic()
    known = load_catalog()
    if task not in known:
        raise UsageError(f'There is no task "{task[:60]}".{did_you_mean(task, list(known))}', hint="mlbench tasks")
    if goal not in (None, "full", "light"):
        raise UsageError(f'--goal "{goal[:60]}" is neither full nor light.', hint=f"mlbench tasks {task}")
    limit = None if deadline is None else parse_duration(deadline, "--deadline")
    names = _clouds(clouds)
    sizes, factors = _numbers(workers, "--workers", int), _numbers(batch, "--batch", float)
    store = Store(notice=console.note)
    with ExitStack() as stack:
        archives = open_archives(store, task, runs, unproven, stack)
        question, base = make_question(known[task], archives, goal, method)
        question = replace(
            question,
            workers=sizes,
            batch_factors=factors,
            max_price=max_price,
            deadline=limit,
        )
        offers, excluded = _offers(names, region or (), spot, interruptions)
        if HERE in names:
            offers += _offer_here(base, question, price_here, excluded)
        result = make_plan(question, offers, excluded)
        if check_quotas:
            result = leave_out_refused(store, result)
        _check_limits(result)
        seconds = time.monotonic() - begun
        if charts is not None:
            _draw(task, result, charts)
        trials = _measure(task, base, result, goal, measure) if measure else []
        if output == Format.json:
            console.out_json({**_document(task, base, result, seconds), "measured": [vars(trial) for trial in trials]})
            return
        _print(task, base, result, seconds)
        if trials:
            _print_trials(trials)


# --- what is asked for ------------------------------------------------------------------------------------------------


def _clouds(text: str) -> list[str]:
    names = [registry.ALIASES.get(word.strip(), word.strip()) for word in text.split(",")]
    for name in names:
        if name not in CLOUDS:
            raise UsageError(f'--clouds "{name[:60]}" is not known.{did_you_mean(name, CLOUDS)}', hint=",".join(CLOUDS))
    return list(dict.fromkeys(names))


def _numbers(text: str, flag: str, kind: type) -> list[Any]:
    """Positive numbers in a list. Raises UsageError."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number <= 10_000 for number in found):
        raise UsageError(f'{flag} "{text[:60]}" is not a list of numbers from 1 to 10000.', hint=f"{flag} 1,2,4")
    return sorted(set(found))


# --- offers -----------------------------------------------------------------------------------------------------------


def _offers(
    clouds: Sequence[str], regions: Sequence[str], spot: bool, interruptions: float
) -> tuple[list[Offer], list[Excluded]]:
    """Machines with known prices, by cloud and region, and what has no price."""
    offers: list[Offer] = []
    missing: Counter[str] = Counter()
    tables = {name: pricing.load_prices(name) for name in clouds if name != HERE}
    for name, table in tables.items():
        places = [place for place in table.list_regions() if not regions or place in regions]
        for machine in load_machines():
            if machine.provider != name:
                continue
            before = len(offers)
            for place in places:
                fee = table.price("control-plane", place) or 0.0
                for is_spot in (False, True) if spot else (False,):
                    lines = [table.line(str(machine), 1, item, place, spot=is_spot) for item in machine.items]
                    if any(line.price is None for line in lines):
                        continue
                    cost, dates = sum(line.price or 0.0 for line in lines), [line.as_of for line in lines if line.as_of]
                    offers.append(
                        Offer(machine, place, cost, fee, min(dates, default=None), is_spot, interruptions * is_spot)
                    )
            missing[name] += len(offers) == before
    hint = "mlbench prices update {}"
    excluded = [
        Excluded(f"machine types of {name} have no known price in these regions", count, hint.format(name))
        for name, count in missing.items()
        if count
    ]
    return offers, excluded


def _offer_here(base: Archive, question: Question, price: float, excluded: list[Excluded]) -> list[Offer]:
    """This machine, if the calibration was made here."""
    if base.run["spec"]["engine"] != "local":
        excluded.append(Excluded("the calibration is from another machine", 1, "A calibration here: --cluster local"))
        return []
    is_gpu = base.run["spec"]["device"] == "gpu"
    cores = int(effective_cores())
    if is_gpu:
        cores = int(question.calibration.ranks * question.calibrated.cores)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 1e6
    return [Offer(MachineType(HERE, "this-machine", "", int(is_gpu), cores, memory, 0.0), "here", price)]


# --- answers ----------------------------------------------------------------------------------------------------------


def _check_limits(result: PlanResult) -> None:
    """Raises UsageError if no candidate is expected to keep the limits."""
    question = result.question
    fastest, cheapest = result.candidates[0], min(result.candidates, key=lambda item: item.price)
    if question.deadline is not None and fastest.low > question.deadline:
        raise UsageError(
            f"No candidate meets the deadline of {console.duration(question.deadline)}: the fastest, {fastest.name} on "
            f"{fastest.offer.machine.provider}, takes about {console.duration(fastest.seconds)}.",
            hint=f"--deadline {math.ceil(fastest.high / 60)}m, more --workers, or --goal light",
        )
    if question.max_price is not None and cheapest.price * cheapest.low / cheapest.seconds > question.max_price:
        raise UsageError(
            f"No candidate costs at most {question.max_price:g} USD: the cheapest, {cheapest.name} on "
            f"{cheapest.offer.machine.provider}, costs about {cheapest.price:.2f} USD.",
            hint=f"--max-price {math.ceil(100 * cheapest.price * cheapest.high / cheapest.seconds) / 100:g}, or --spot",
        )


def _warnings(result: PlanResult) -> list[str]:
    """What makes the plan less certain than it looks."""
    found = []
    old: dict[str, int] = {}
    for item in result.candidates:
        age = pricing.age_in_days(item.offer.as_of)
        if age is not None and age > pricing.OLD_DAYS:
            name = item.offer.machine.provider
            old[name] = max(age, old.get(name, 0))
    for name, age in old.items():
        found.append(f"prices of {name} are up to {age} days old: mlbench prices update {name}")
    guessed = [item for item in result.best if item.speed.basis == "guessed"]
    if guessed:
        names = ", ".join(sorted({str(item.offer.machine) for item in guessed}))
        found.append(f"the speed of {names} is a guess; a short calibration on one such machine replaces it")
    return found


def _settings(task: str, base: Archive, item: Candidate) -> dict[str, Any]:
    """Parameters of a candidate that are not its preset's: those of the calibrated run, and the batch size."""
    parameters: dict[str, Any] = dict(base.run["spec"]["parameters"])
    usual = load_catalog()[task].resolve(base.run["spec"]["preset"] or "spec")
    if "global_batch" in parameters:
        parameters["global_batch"] = item.batch
    else:
        parameters["batch_size"] = item.rank_batch
    return {key: value for key, value in parameters.items() if key in usual and value != usual[key]}


@dataclass(frozen=True)
class Trial:
    """A candidate that was run: seconds of the task until the goal, planned and measured."""

    run: str
    candidate: str
    planned_seconds: float
    measured_seconds: float | None
    error: float | None


def _measure(task: str, base: Archive, result: PlanResult, goal: str | None, count: int) -> list[Trial]:
    """Run the best candidates for this machine, one after the other. Their archives are the evidence, and an experiment
    file in the data folder repeats these runs.

    Raises UsageError if no candidate is for this machine.
    """
    here = [item for item in result.candidates if item.offer.machine.provider == HERE]
    if not here:
        raise UsageError(
            "--measure runs candidates on this machine, but none of them is for it.",
            hint="--clouds here; on a cloud, run the commands of the plan",
        )
    here.sort(key=lambda item: item.seconds)
    chosen = here[:count]
    stamp = f"{time.time():.0f}"[-6:]
    spec = base.run["spec"]
    requests = [
        Request(
            name=f"plan-{stamp}-{number}",
            workers=(item.workers,),
            task=task,
            preset=spec["preset"],
            set=_settings(task, base, item),
            method=item.method,
            num_cpus=int(spec.get("cpus") or 1),
            light=(goal or spec.get("goal")) == "light" or None,
        )
        for number, item in enumerate(chosen, 1)
    ]
    file = data_dir() / "plans" / f"plan-{stamp}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    runs = [request_document(replace(each, name=f"best-{number}")) for number, each in enumerate(requests, 1)]
    document = {"title": f"The best candidates of a plan for {task}", "clusters": ["local"], "runs": runs}
    write_atomically(file, yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode())
    trials, client = [], api.Client(notice=console.note)
    for item, request in zip(chosen, requests, strict=True):
        console.note(f"{request.name}: {item.name}, planned {console.duration(item.seconds - item.startup)}")
        client.submit(replace(request, cluster="local")).wait()
        run = f"{request.name}-{item.workers}"
        with open_run(client.store, run, True) as archive:
            reached = archive.result["outcome"] == "goal_reached"
            taken = archive.result["task_seconds"]["wall"] if reached else None
        planned = item.seconds - item.startup
        trials.append(Trial(run, item.name, planned, taken, None if taken is None else planned / taken - 1))
    console.note(f"To repeat: mlbench run -f {shlex.quote(str(file))}")
    return trials


def _print_trials(trials: Sequence[Trial]) -> None:
    console.out("\nMeasured:")
    console.out_table(
        ["RUN", "CANDIDATE", "PLANNED", "MEASURED", "ERROR"],
        [
            [
                *(trial.run, trial.candidate, console.duration(trial.planned_seconds)),
                "goal not reached" if trial.measured_seconds is None else console.duration(trial.measured_seconds),
                None if trial.error is None else f"{100 * trial.error:+.0f} %",
            ]
            for trial in trials
        ],
    )
    errors = sorted(abs(trial.error) for trial in trials if trial.error is not None)
    if errors:
        console.note(f"Median error of the plan: {100 * errors[len(errors) // 2]:.0f} %.")


def _commands(task: str, base: Archive, item: Candidate) -> list[str]:
    """What to run for a candidate."""
    spec, machine, name = base.run["spec"], item.offer.machine, RELEASE
    preset = f" --preset {shlex.quote(str(spec['preset']))}" if spec["preset"] not in (None, "spec") else ""
    sets = "".join(f" --set {shlex.quote(f'{key}={value}')}" for key, value in _settings(task, base, item).items())
    run = f"mlbench run {name} {item.workers} --task {task}{preset}{sets} --method {item.method}"
    if machine.provider == HERE:
        return [f"{run} --num-cpus {base.run['spec'].get('cpus') or 1:g}"]
    return [
        creation_command(item),
        f"{run}{' --gpu' if machine.gpus else ''}",
        f"mlbench delete-cluster {name}-{item.workers}",
    ]


def _row(item: Candidate) -> list[object]:
    offer = item.offer
    ratio = item.price / item.seconds if item.seconds else 0.0
    price = "0" if not item.price else f"{item.price:.3g} ({item.low * ratio:.3g} to {item.high * ratio:.3g})"
    return [
        *(offer.machine.provider, offer.region, f"{offer.machine}{' spot' if offer.is_spot else ''}", item.workers),
        *(item.method, item.batch, f"{100 * item.kept:.0f} %"),
        f"{console.duration(item.seconds)} ({console.duration(item.low)} to {console.duration(item.high)})",
        price,
        None if item.chance is None else f"{100 * item.chance:.0f} %",
        item.speed.basis.value,
    ]


HEADERS = ("CLOUD", "REGION", "MACHINE", "WORKERS", "METHOD", "BATCH", "SAMPLES KEPT", "TIME", "PRICE USD")


def _print(task: str, base: Archive, result: PlanResult, seconds: float) -> None:
    headers, droppable = [*HEADERS, "CHANCE", "SPEED"], ["CHANCE", "SAMPLES KEPT", "REGION", "SPEED"]
    console.out("Best:")
    console.out_table(headers, [_row(item) for item in result.best], droppable=droppable)
    for number, item in enumerate(result.best, 1):
        console.out(f"{number}. {item.name}: {'; '.join(explain(item, result))}. Speed: {item.speed.note}.")
        for line in _commands(task, base, item):
            console.out(f"   {line}")
    console.out("\nNothing is faster and cheaper than:")
    shown = result.pareto if len(result.pareto) <= SHOWN else result.pareto[:: math.ceil(len(result.pareto) / SHOWN)]
    console.out_table(headers, [_row(item) for item in shown], droppable=droppable)
    console.out("\nThe first answer depends most on:")
    console.out_table(
        ["CAUSE", "SHARE OF UNCERTAINTY", "TIME IF 90TH PERCENTILE"],
        [
            [cause, f"{100 * share:.0f} %", f"x {factor:.2f}"]
            for cause, share, factor in find_sensitivities(result.best[0])
        ],
    )
    if result.excluded:
        console.out("\nLeft out:")
        rows = [[each.reason, each.count, each.hint or None] for each in result.excluded]
        console.out_table(["REASON", "COUNT", "NEXT"], rows, wrap=True)
    shares = ", ".join(f"{basis} {100 * share:.0f} %" for basis, share in count_bases(result.candidates).items())
    note = result.question.samples.note
    console.note(
        f"{len(result.candidates):,} candidates in {seconds:.1f} s, from {base.run['name']}; figures: {shares}."
    )
    console.note(f"{note[0].upper()}{note[1:]}.")
    console.note("Times and prices are medians with 10th and 90th percentiles. Prices: machines and control plane.")
    for warning in _warnings(result):
        console.warn(warning)


def _item_document(item: Candidate) -> JsonObject:
    ratio = item.price / item.seconds if item.seconds else 0.0
    return {
        "cloud": item.offer.machine.provider,
        "region": item.offer.region,
        "machine": str(item.offer.machine),
        "spot": item.offer.is_spot,
        "workers": item.workers,
        "method": item.method,
        "rank_batch": item.rank_batch,
        "global_batch": item.batch,
        "samples_to_goal": item.samples,
        "samples_kept": item.kept,
        "step_seconds": item.step.seconds,
        "exposed_share": item.exposed,
        "seconds": item.seconds,
        "low_seconds": item.low,
        "high_seconds": item.high,
        "price": item.price,
        "low_price": item.low * ratio,
        "high_price": item.high * ratio,
        "price_as_of": item.offer.as_of,
        "interruption_seconds": item.overhead,
        "checkpoint_every_seconds": item.checkpoint_every,
        "chance": item.chance,
        "bases": {name: basis.value for name, basis in item.bases.items()},
        "speed_note": item.speed.note,
    }


def _document(task: str, base: Archive, result: PlanResult, seconds: float) -> JsonObject:
    samples = result.question.samples
    return {
        "schema_version": 1,
        "task": task,
        "run": base.run["name"],
        "currency": "USD",
        "candidates": len(result.candidates),
        "planning_seconds": seconds,
        "samples_basis": samples.basis,
        "samples_note": samples.note,
        "bases": {basis.value: share for basis, share in count_bases(result.candidates).items()},
        "best": [
            {**_item_document(item), "reasons": explain(item, result), "commands": _commands(task, base, item)}
            for item in result.best
        ],
        "pareto": [_item_document(item) for item in result.pareto],
        "sensitivities": [
            {"cause": cause, "share": share, "factor": factor}
            for cause, share, factor in find_sensitivities(result.best[0])
        ],
        "excluded": [{"reason": each.reason, "count": each.count, "hint": each.hint} for each in result.excluded],
        "warnings": _warnings(result),
    }


def _draw(task: str, result: PlanResult, folder: Path) -> None:
    clouds: dict[str, list[tuple[float, float]]] = {}
    for item in result.candidates:
        clouds.setdefault(item.offer.machine.provider, []).append((item.seconds, item.price))
    line, best = ([(item.seconds, item.price) for item in each] for each in (result.pareto, result.best))
    for path in draw_plan(task, clouds, line, best, folder):
        console.note(f"Written: {path}")
