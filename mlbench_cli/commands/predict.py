"""`mlbench predict`: time and price of a run with other workers, networks or machines, from runs that have ended."""

from collections import defaultdict
from contextlib import ExitStack
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client
from mlbench_cli.commands._archives import Unproven, open_archives
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import format_rate, format_seconds, parse_network
from mlbench_cli.predict.machines import Machine, find_machine, require_measured
from mlbench_cli.predict.model import LOOPBACK, Link, Measured, Prediction, measure, predict
from mlbench_cli.results.analysis.numbers import SAMPLES_PER_SECOND, SECONDS, format_money, format_percent, format_value
from mlbench_cli.util.text import counted


def predict_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="runs, experiments or archives of one task; each method gets its own rows",
            autocompletion=complete_names,
        ),
    ],
    workers: Annotated[
        str | None, typer.Option("--workers", metavar="N,N", help="numbers of workers, e.g. 2,4,8; default: the runs'")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="MACHINE",
            help="machine type with the GPU of the runs, e.g. gke/a3-highgpu-8g; default: that of the runs",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="RATE[,DELAY]", help="network between workers; default: as the runs probed"),
    ] = None,
    worker_hour: Annotated[
        float | None,
        typer.Option("--worker-hour", min=0.0, metavar="USD", help="price per worker and hour; default: list price"),
    ] = None,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Predict time and price with other numbers of workers, networks or machines, from runs that have ended.

    Computing time is measured. Communication is each method's own formula on the network, plus what the runs took
    beyond it. The interval is wider the farther a prediction is from the runs.
    """
    sizes = _parse_sizes(workers)
    machine = None if on is None else find_machine(on)
    link = None if network is None else Link.of_shape(parse_network(network))
    client = Client(notice=console.note)
    with ExitStack() as stack:
        archives = open_archives(client.find_archives(runs), stack, unproven=unproven)
        known = [measure(archive.run, archive.result, archive.environment) for archive in archives]
    if len(tasks := sorted({one.task for one in known})) > 1:
        raise UsageError(f"These runs are of several tasks: {', '.join(tasks)}.", hint="Name runs of one task.")
    by_method: dict[str, list[Measured]] = defaultdict(list)
    for one in known:
        by_method[one.method.name].append(one)
    if machine is not None:
        require_measured(machine, known)
        link = link or machine.link
    found: list[Prediction] = []
    for group in by_method.values():
        own = sorted({one.ranks // one.ranks_per_worker for one in group})
        known_price = group[0].per_hour if machine is None else machine.price
        per_hour = known_price if worker_hour is None else worker_hour
        found += [predict(group, size, link, per_hour) for size in sizes or own]
    if output == Format.json:
        console.out_json({"task": tasks[0], "predictions": [item._asdict() for item in found]})
        return
    _show(found, known, machine, link)


def _parse_sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f'--workers "{text[:60]}" is not a list of numbers.', hint="--workers 2,4,8") from None


def _show(found: list[Prediction], known: list[Measured], machine: Machine | None, link: Link | None) -> None:
    has_goal = any(item.seconds_to_goal is not None for item in found)
    price = "PRICE (USD)" if has_goal else "USD/H"
    heads = ["METHOD", "WORKERS", "UPDATE", "INTERVAL", "SAMPLES/S", "COMPUTING", "TO GOAL", price, "BASIS"]
    console.out_table(heads, [_row(item) for item in found], droppable=["COMPUTING", "INTERVAL"])
    on = "" if machine is None else f"On {machine}. "
    if shown := link or next((one.link for one in known if one.link is not None), None):
        told = " (assumed, within one machine)" if shown is LOOPBACK else "" if link else ", as the runs probed it"
        console.note(f"{on}Network: {format_rate(shown.rate)}, round trip {format_seconds(shown.round_trip)}{told}.")
    console.note(f"From {counted(len(known), 'run')}. Basis:")
    for basis in dict.fromkeys(item.basis for item in found):
        console.note(f"  {basis.value}: {basis.meaning}")
    if any(item.is_lower_bound for item in found):
        console.note('"at least": this many samples reached the goal with a smaller batch; a larger one needs more.')


def _row(item: Prediction) -> list[str | int]:
    bound = "at least " if item.is_lower_bound else ""
    goal, price = item.seconds_to_goal, item.price_usd
    return [
        *(item.method, item.workers, format_value(item.update_seconds, SECONDS)),
        f"{format_value(item.low_seconds, SECONDS)} to {format_value(item.high_seconds, SECONDS)}",
        format_value(item.samples_per_second, SAMPLES_PER_SECOND),
        format_percent(item.computing_seconds / item.update_seconds),
        "-" if goal is None else f"{bound}{format_value(goal, SECONDS)}",
        "unknown" if price is None else f"{bound}{format_money(price)}",
        item.basis.value,
    ]
