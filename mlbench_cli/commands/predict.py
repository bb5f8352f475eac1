"""`mlbench predict`: what a step would take with other workers, networks and methods, and how far to trust that."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api.calibrated import open_run, own_method, read_calibration, read_run_probe
from mlbench_cli.commands._archives import Unproven
from mlbench_cli.commands._common import Format, Output, complete_runs
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.network import format_rate, format_seconds, parse_network
from mlbench_cli.model.run import JsonObject
from mlbench_cli.predict.samples import SamplesToGoal, choose_model, read_noise_scale, read_point
from mlbench_cli.results.analysis.goodput import Goodput, measure_goodput
from mlbench_cli.results.analysis.numbers import (
    SAMPLES_PER_SECOND,
    SECONDS,
    format_money,
    format_percent,
    format_value,
)
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.predictions import PredictedPair, draw_predictions
from mlbench_cli.simulator.calibration import Calibration
from mlbench_cli.simulator.faults import parse_rates, predict_faults
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.predict import MIN_LATENCY, Prediction, Scenario, advise
from mlbench_cli.simulator.predict import predict as predict_step
from mlbench_cli.simulator.published import ALL_REDUCE, SUPPORTED, compare_order, compare_published, summarize
from mlbench_cli.simulator.stragglers import parse_spread
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import counted
from task_images.comm.methods import Method
from task_images.comm.presets import PRESETS, resolve

PUBLISHED = "published"


def predict(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="a run, or the folder or zip of one, that was calibrated (mlbench run --calibrate)",
            autocompletion=complete_runs,
        ),
    ] = None,
    workers: Annotated[
        str | None, typer.Option("--workers", metavar="N,N", help="numbers of workers; default: the run's")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="RATE[,DELAY]", help="shaped network of the workers; default: the run's"),
    ] = None,
    network_of: Annotated[
        str | None, typer.Option("--network-of", metavar="RUN", help="network of another run, as its probe measured it")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="NAME,NAME", help="methods to compare; default: the run's")
    ] = None,
    topology: Annotated[
        str | None, typer.Option("--topology", metavar="NODESxGPUS", help="nodes and ranks of each, e.g. 8x4")
    ] = None,
    inside: Annotated[
        str, typer.Option("--inside", metavar="KIND", help="links inside a node: pcie or nvlink")
    ] = "pcie",
    oversubscription: Annotated[
        float, typer.Option("--oversubscription", metavar="FACTOR", help="edge capacity over core capacity")
    ] = 1.0,
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="gloo or nccl")] = "gloo",
    servers: Annotated[int | None, typer.Option("--servers", min=1, help="number of parameter servers")] = None,
    stragglers: Annotated[
        str | None,
        typer.Option(
            "--stragglers",
            metavar="SPREAD",
            help="standard deviation of a rank's computing time from step to step, e.g. 10%, or: measured; default: 0",
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", min=0.0, metavar="RATE", help="price of a worker for an hour; default: the run's"),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="another run of the task at another batch size, for the samples to its goal; repeatable",
            autocompletion=complete_runs,
        ),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            "--faults",
            metavar="mtbf=TIME,...",
            help="productive share of the time under random faults, e.g. mtbf=10m,checkpoint=1s,restart=30s; for a "
            "RUN with faults, its measured values",
        ),
    ] = None,
    charts: Annotated[
        Path | None, typer.Option("--charts", metavar="FOLDER", help="with --check: draw it into this folder")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="compare predictions with measurements: of RUNs, or of published tables")
    ] = False,
    advice: Annotated[bool, typer.Option("--advise", help="show what would help most")] = False,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Predict the step time with other worker counts, networks and methods.

    Each prediction has an interval. If the calibration of the run does not support a prediction, mlbench rejects it and
    says what to measure.
    """
    if faults is not None:
        _show_faults(faults, runs or [], unproven, output)
        return
    if check and (not runs or runs == [PUBLISHED]):
        _check_published(output, charts)
        return
    if charts is not None and not check:
        raise UsageError("--charts draws predictions against measurements.", hint="mlbench predict --check --charts F")
    if not runs:
        raise UsageError("No run given.", hint="mlbench predict RUN --workers 4,8, or: mlbench predict --check")
    if check:
        _check_runs(runs, output, charts, unproven)
        return
    if len(runs) > 1:
        raise UsageError("A prediction uses one run.", hint="mlbench predict --check RUN RUN")
    if network is not None and network_of is not None:
        raise UsageError("--network and --network-of exclude each other.", hint="Give one of them.")
    probed = None if network_of is None else read_run_probe(Store(notice=console.note), network_of, unproven)
    with open_run(Store(notice=console.note), runs[0], unproven) as archive:
        calibration, link, error = read_calibration(archive, required=network is None and probed is None)
        links, library, nodes = _inside(inside), _backend(backend), _topology(topology)
        shape = None if network is None else parse_network(network)
        spread = parse_spread(stragglers, calibration)
        scenarios = [
            _add_buckets(
                Scenario(
                    *(size, chosen, shape, *_fill_nodes(nodes, size), links, oversubscription, servers),
                    *(library, spread),
                    probed=probed,
                ),
                calibration,
                archive,
            )
            for size in _sizes(workers, nodes, calibration.ranks)
            for chosen in _methods(method, archive)
        ]
        if advice:
            _show_advice(calibration, link, error, scenarios[0], output)
            return
        found = [predict_step(calibration, link, error, scenario) for scenario in scenarios]
        needed = _find_samples(archive, more or (), unproven)
        _show(found, archive, link, error, needed, price if price is not None else _price(archive), output)


def _show_faults(text: str, runs: Sequence[str], unproven: bool, output: Format) -> None:
    """What checkpoints and restarts leave of the time, and of one run what it measured beside that."""
    if len(runs) > 1:
        raise UsageError("--faults takes at most one run.", hint="mlbench predict RUN --faults mtbf=10m")
    measured: Goodput | None = None
    known: dict[str, float] = {}
    if runs:
        with open_run(Store(notice=console.note), runs[0], unproven) as archive:
            measured = measure_goodput(archive)
            facts = archive.result["faults"]
        if facts["checkpoint_seconds"] is not None:
            known["checkpoint"] = float(facts["checkpoint_seconds"])
        if facts["recoveries"]:
            costs = [each["detection"] + each["restart"] + each["loading"] for each in facts["recoveries"]]
            known["restart"] = sum(costs) / len(costs)
        if measured.interval is not None:
            known["interval"] = measured.interval
    rates = parse_rates(text, known)
    found = predict_faults(rates)
    if output == Format.json:
        console.out_json(
            {
                "rates": asdict(rates),
                "predictions": [asdict(item) for item in found],
                "measured": None if measured is None else measured.value,
                "measured_after_startup": None if measured is None else measured.after_startup,
            }
        )
        return
    rows = [
        [
            format_value(item.interval, SECONDS) + (" (best)" if item.is_best else ""),
            format_percent(item.formula),
            format_percent(item.replayed),
            f"{format_percent(item.low)} to {format_percent(item.high)}",
        ]
        for item in found
    ]
    console.out_table(["CHECKPOINT EVERY", "E[ETTR]", "REPLAYED", "95 % OF REPLAYS"], rows)
    if measured is not None and measured.after_startup is not None:
        own = next((item.replayed for item in found if item.interval == measured.interval), None)
        seconds = format_value(measured.wall - measured.parts["startup"], SECONDS)
        console.note(
            f"{measured.name} measured {format_percent(measured.after_startup)} in the {seconds} after start-up, with "
            f"{counted(measured.restarts, 'restart')}"
            + ("." if own is None else f"; the replay predicts {format_percent(own)} at its interval.")
        )


# --- what is asked for ------------------------------------------------------------------------------------------------


def _sizes(text: str | None, topology: tuple[int, int] | None, own: int) -> list[int]:
    """Numbers of workers: of --workers, else of the whole --topology, else of the run itself."""
    if text is None:
        return [own if topology is None else topology[0] * topology[1]]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f'--workers "{text[:60]}" is not a list of numbers.', hint="--workers 4,8,16") from None


def _topology(text: str | None) -> tuple[int, int] | None:
    """Nodes, and ranks of each, of --topology."""
    if text is None:
        return None
    nodes, cross, per_node = text.lower().partition("x")
    if not cross or not nodes.isdecimal() or not per_node.isdecimal() or not int(nodes) or not int(per_node):
        raise UsageError(f'--topology "{text[:60]}" is not of the form NODESxGPUS.', hint="--topology 8x4")
    return int(nodes), int(per_node)


def _fill_nodes(topology: tuple[int, int] | None, size: int) -> tuple[int | None, int | None]:
    """How many of the topology's nodes `size` workers fill, and ranks of each; None of both without a topology."""
    if topology is None:
        return None, None
    nodes, per_node = topology
    if size % per_node:
        raise UsageError(f"{size} workers do not fill nodes of {per_node}.", hint=f"--workers {nodes * per_node}")
    return size // per_node, per_node


def _inside(text: str) -> str:
    if text not in ("pcie", "nvlink"):
        raise UsageError(f'--inside "{text[:60]}" is neither pcie nor nvlink.')
    return text


def _backend(text: str) -> str:
    if text not in ("gloo", "nccl"):
        raise UsageError(f'--backend "{text[:60]}": only gloo and nccl are modeled.')
    return text


def _methods(text: str | None, archive: Archive) -> list[Method]:
    if text is None:
        return [own_method(archive)]
    found = []
    for name in text.split(","):
        if name not in PRESETS:
            near = did_you_mean(name, list(PRESETS))
            raise UsageError(f'There is no method "{name[:60]}".{near}', hint="mlbench methods")
        found.append(resolve(name))
    return found


def _add_buckets(scenario: Scenario, calibration: Calibration, archive: Archive) -> Scenario:
    """With the run's own messages, if it is the run that is asked for: plans that it measured for need no guess."""
    if scenario.is_elsewhere or (scenario.ranks, scenario.method) != (calibration.ranks, own_method(archive)):
        return scenario
    return replace(scenario, buckets=calibration.buckets)


# --- answers ----------------------------------------------------------------------------------------------------------


def _price(archive: Archive) -> float | None:
    """What a worker of the run was planned to cost for an hour; None if nobody knows."""
    per_hour = archive.run["spec"]["price"].get("per_hour")
    return None if per_hour is None else float(per_hour) / int(archive.run["spec"]["workers"])


def _find_samples(archive: Archive, more: Sequence[str], unproven: bool) -> SamplesToGoal | None:
    """Samples to the goal of the run, over the batch size; None if it did not reach its goal and no others are given.

    Raises UsageError for one of `more` that did not, or that is of another task.
    """
    try:
        points = [read_point(archive.run, archive.result)]
    except UsageError:
        if more:
            raise
        return None
    task = archive.run["spec"]["task"]
    for name in more:
        with open_run(Store(notice=console.note), name, unproven) as other:
            if other.run["spec"]["task"] != task:
                raise UsageError(f'The run "{name[:60]}" is of {other.run["spec"]["task"]}, not of {task}.')
            points.append(read_point(other.run, other.result))
    return choose_model(task, points, read_noise_scale(archive.result))


@dataclass(frozen=True)
class _Totals:
    """Samples, seconds and price until the goal. `kept`: see SamplesToGoal; None: the samples are the run's own, and
    the figures a bound if the batch size is not the run's."""

    samples: float
    seconds: float
    price: float | None
    kept: float | None
    bound: str = ""


def _totals(found: Prediction, needed: SamplesToGoal | None, price: float | None, each: int) -> _Totals | None:
    """Until the goal; None if the run did not reach it. `price` is a worker's for an hour; it has `each` ranks."""
    if needed is None:
        return None
    batch = found.scenario.ranks * found.batch
    samples = needed.samples(batch)
    bound = "" if samples is not None else "at least " if batch > needed.at else "at most "
    samples = needed.known if samples is None else samples
    seconds = samples / batch * found.step.seconds
    cost = None if price is None else price * math.ceil(found.scenario.ranks / each) * seconds / 3600
    return _Totals(samples, seconds, cost, needed.kept(batch), bound)


def _show(
    found: Sequence[Prediction],
    archive: Archive,
    link: Link,
    error: float,
    needed: SamplesToGoal | None,
    price: float | None,
    output: Format,
) -> None:
    each = int(archive.run["spec"]["processes_per_worker"])
    totals = [_totals(item, needed, price, each) for item in found]
    currency = str(archive.run["spec"]["price"].get("currency") or "USD")
    if output == Format.json:
        rows = [
            {
                **item.to_dict(),
                "seconds_to_goal": total and total.seconds,
                "price_to_goal": total and total.price,
                "currency": currency,
                "samples_to_goal": total and total.samples,
                "samples_kept": total and total.kept,
                "bound": (total and total.bound.strip()) or None,
            }
            for item, total in zip(found, totals, strict=True)
        ]
        console.out_json(
            {
                "schema_version": 1,
                "run": archive.run["name"],
                "model_error": error,
                "samples_basis": needed.basis if needed else None,
                "samples_note": needed.note if needed else None,
                "predictions": rows,
            }
        )
        return
    console.out_table(
        [
            *("METHOD", "WORKERS", "NETWORK", "STEP", "INTERVAL", "EFFICIENCY", "EXPOSED", "SENT", "THROUGHPUT"),
            *("SAMPLES KEPT", "TO GOAL", f"PRICE {currency}", "BASIS"),
        ],
        [_cells(item, total) for item, total in zip(found, totals, strict=True)],
        droppable=["SENT", "EXPOSED", "THROUGHPUT", "EFFICIENCY", f"PRICE {currency}", "SAMPLES KEPT", "TO GOAL"],
    )
    if needed is None:
        console.note("The run did not reach its goal, so the number of samples to the goal is unknown.")
    else:
        console.note(f"{needed.note[0].upper()}{needed.note[1:]}.")
    if spread := found[0].scenario.spread:
        console.note(f"Synchronous methods wait for the slowest rank; compute times vary by {spread:.1%}.")
    name = archive.run["name"]
    if any(item.scenario.network is not None for item in found):
        console.note(
            "--network assumes a shaped network that delivers its nominal rate; real networks are often slower. "
            "To use a measured network: --network-of RUN"
        )
    if not link.beta:
        console.note(f"From the step times of {name}; the network is as requested.")
        return
    latency = format_seconds(link.alpha) if link.alpha >= MIN_LATENCY else "too short to resolve"
    console.note(
        f"From {name}: a link of {format_rate(8 / link.beta)}, latency one way {latency}; the model is "
        f"{100 * error:.0f} % off on its own all-reduces."
    )


def _cells(found: Prediction, total: _Totals | None) -> list[object]:
    step = found.step
    return [
        *(found.scenario.method.name, found.scenario.ranks, found.scenario.network_text),
        format_seconds(step.seconds),
        f"{format_seconds(found.low)} to {format_seconds(found.high)}",
        format_percent(step.efficiency),
        format_seconds(step.exposed) if step.exposed > 1e-7 else "0",
        format_value(step.sent_bytes, "B"),
        format_value(found.scenario.ranks * found.batch / step.seconds, SAMPLES_PER_SECOND),
        None if total is None or total.kept is None else format_percent(total.kept),
        None if total is None else f"{total.bound}{console.duration(total.seconds)}",
        None if total is None or total.price is None else f"{total.bound}{format_money(total.price)}",
        found.basis,
    ]


def _show_advice(calibration: Calibration, link: Link, error: float, scenario: Scenario, output: Format) -> None:
    found = advise(calibration, link, error, scenario)
    rows: list[JsonObject] = [
        {"change": item.change, "options": item.command, "step_seconds": item.seconds, "gain": item.gain}
        for item in found
    ]
    if output == Format.json:
        console.out_json({"schema_version": 1, "advice": rows})
        return
    if not found:
        console.out(f"No modeled change would gain more than the model's error ({100 * error:.0f} %).")
        return
    console.out_table(
        ["CHANGE", "STEP", "GAIN", "OPTIONS"],
        [[item.change, format_seconds(item.seconds), f"{100 * item.gain:+.0f} %", item.command] for item in found],
        wrap=True,
    )


def _check_runs(names: Sequence[str], output: Format, charts: Path | None, unproven: bool) -> None:
    """Each run's step as predicted from its own calibration, against the step that it measured."""
    rows: list[JsonObject] = []
    for name in console.track("Predicting", names):
        with open_run(Store(notice=console.note), name, unproven) as archive:
            calibration, link, error = read_calibration(archive, required=True)
            scenario = _add_buckets(Scenario(calibration.ranks, own_method(archive)), calibration, archive)
            found = predict_step(calibration, link, error, scenario)
            measured = _measured_step(archive)
            rows.append(
                {
                    "run": archive.run["name"],
                    "workers": calibration.ranks,
                    "method": scenario.method.name,
                    "measured_seconds": measured,
                    "predicted_seconds": found.step.seconds,
                    "error": None if measured is None else found.step.seconds / measured - 1,
                    "collectives_error": error,
                }
            )
    pairs = [
        PredictedPair("runs", str(row["method"]), row["measured_seconds"], row["predicted_seconds"])
        for row in rows
        if row["measured_seconds"]
    ]
    _draw(pairs, "seconds of a step", charts)
    if output == Format.json:
        console.out_json({"schema_version": 1, "runs": rows})
        return
    console.out_table(
        ["RUN", "WORKERS", "METHOD", "MEASURED", "PREDICTED", "ERROR", "COLLECTIVES"],
        [
            [
                *(row["run"], row["workers"], row["method"]),
                None if row["measured_seconds"] is None else format_seconds(row["measured_seconds"]),
                format_seconds(row["predicted_seconds"]),
                None if row["error"] is None else f"{100 * row['error']:+.1f} %",
                f"{100 * row['collectives_error']:.1f} %",
            ]
            for row in rows
        ],
    )


def _measured_step(archive: Archive) -> float | None:
    """Seconds of a training step of the run: the median of its timed blocks, else the mean over all of its steps."""
    protocol = archive.result["details"].get("throughput_protocol")
    if protocol:
        return float(protocol["per_update"]) / float(protocol["summary"]["median"])
    updates, seconds = archive.result.get("updates"), archive.result["task_seconds"]["training"]
    waited = archive.result["timings"].get("data_wait", {}).get("rank0", 0.0)
    return (seconds + waited) / updates if updates and seconds else None


def _draw(pairs: Sequence[PredictedPair], unit: str, folder: Path | None) -> None:
    if folder is None:
        return
    for path in draw_predictions(pairs, unit, folder):
        console.note(f"Written: {path}")


def _check_published(output: Format, charts: Path | None) -> None:
    found = compare_published(
        watch=lambda cells: console.track("Predicting", cells, lambda cell: f"{cell.model}, {cell.method}")
    )
    pairs = [
        PredictedPair(item.cell.network, item.cell.method, item.cell.rate, item.predicted_rate)
        for item in found
        if not item.is_calibration
    ]
    _draw(pairs, "samples per second", charts)
    if output == Format.json:
        cells: list[JsonObject] = [
            {
                **{name: getattr(item.cell, name) for name in ("model", "network", "method", "gpus")},
                "measured": item.cell.rate,
                "predicted": item.predicted_rate,
                "error": item.error,
                "is_calibration": item.is_calibration,
            }
            for item in found
        ]
        orders = {"all": asdict(compare_order(found)), "all_reduce": asdict(compare_order(found, ALL_REDUCE))}
        console.out_json({"schema_version": 1, "cells": cells, "order": orders})
        return
    console.out_table(
        ["METHOD", "CELLS", "MEAN ERROR", "WORST", "CLAIM"],
        [
            [method, count, f"{100 * mean:.1f} %", f"{100 * worst:.1f} %", "yes" if method in SUPPORTED else "no"]
            for method, count, mean, worst in summarize(found)
        ],
    )
    for what, order in (("all-reduce methods", compare_order(found, ALL_REDUCE)), ("methods", compare_order(found))):
        console.note(
            f"The fastest of the {what} is the predicted one in {order.fastest} of {order.settings} settings, and "
            f"{order.right} of {order.pairs} pairs are in the right order."
        )
    console.note(
        "ddl-benchmarks of 2020-05-29: three models, three networks, 8 to 32 GPUs, samples per second. For each "
        "network, two cells of ResNet-50 on 8 GPUs give its constants. All cells: -o json"
    )
