"""Every method trains the digits to their goal on two shaped networks, three times each; the page of what they reach.

    .venv/bin/python -m benchmarks.goals [--write] [--repeats 3] [--ranks 2] [--networks NETWORK ...]
                                          [--methods PRESET ...] [--record FILE] [--budget MINUTES]

All ranks and parameter servers are processes of this machine with links of their own (see docs/how-to/network.md); a
link is probed before its first training. The network "none" is this machine's own, unshaped. Repeats differ by their
seed, and all methods train once before any trains again. FILE gets one JSON line of each training; one that ended well
is not repeated, so that the table can be made in pieces: after --budget minutes no training begins, and the command
says how many are left, and for how long: all are some 240. --write puts the page into
docs/development/methods-measured.md.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

# As a script the repository is not on the path; with -m it is.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from mlbench_cli.agent.network.namespaces import ShapingError
from mlbench_cli.agent.network.shaped import ShapedNetwork
from mlbench_cli.model.network import parse_network, worker_address
from mlbench_cli.results.analysis.stats import estimate
from mlbench_cli.tasks.catalog import load_task
from task_images.methods import FILES
from task_images.methods.base import Method, MethodError
from task_images.methods.catalog import find_class
from tests.contract.task_images.forks import fork_rank
from tests.contract.task_images.ranks import environments, read_ended

NETWORKS, UNSHAPED = ("1gbit,0.5ms", "200mbit,2ms"), "none"
SEED, REPEATS = 42, 3
UNCOUNTED = ("fsdp2", "hsdp")  # torch sends for them
RECORD = Path("build/goals.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "development" / "methods-measured.md"
CHECK = re.compile(r"self-check passed in ([\d.]+) s")
MIN_SECONDS, MAX_SECONDS = 60.0, 300.0
DECODER = {"steps": 250, "goal_full": 2.6, "goal_light": 2.9, "evaluate_every": 10, "validation_sequences": 256}


@dataclass(frozen=True)
class Row:
    """One line of the table: a method, what differs from its defaults, and why.

    Each row measures the method that it names: what begins later begins well before the goal is reached.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    task: str = "digits_resnet"
    parameters: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    ranks: int = 0  # 0: those that are asked for

    @property
    def title(self) -> str:
        """The method and its task, if it is another one."""
        return f"`{self.name}`" + (", decoder" if self.task != "digits_resnet" else "")

    def resolve(self) -> Method:
        return find_class(self.name)(**self.options)


SPECIAL = {
    "diloco": Row("diloco", {"steps": "10"}, why="an outer step every 10 updates instead of 50"),
    "dgc": Row("dgc", {"warmup": "24"}, why="the density falls to 1 % over 24 updates, as the paper's warm-up does"),
    "signsgd-mv": Row(
        "signsgd-mv", parameters={"learning_rate": 0.0003},
        why="a learning rate of 0.0003 instead of 0.01, because each element of an update is +1 or -1",
    ),
    "hsdp": Row("hsdp", ranks=4, why="four ranks, the minimum for two groups of shards"),
    "onebit-adam": Row(
        "onebit-adam", {"warmup_steps": "40"}, "gpt_pretraining", DECODER,
        "needs AdamW: the tiny decoder to a loss of 2.6, with signs after 40 updates; compare with `bsp, decoder`",
    ),
}  # fmt: skip
EXTRA = (Row("bsp", {}, "gpt_pretraining", DECODER, "the same decoder with plain averaging"),)


class Training(TypedDict, total=False):
    """One training: what it was, and what became of it. `why` if it failed, the others if not."""

    row: str
    network: str
    ranks: int
    seed: int
    outcome: str
    why: str
    value: float
    updates: float
    seconds: float
    samples_per_second: float
    bytes_per_update: float
    check_seconds: float
    load: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", metavar="PRESET", default=list(FILES))
    parser.add_argument("--budget", type=float, default=25.0, metavar="MINUTES", help="start no training after; 25")
    options = parser.parse_args()
    options.record.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = list_rows(options.methods, options.ranks)
    end = time.monotonic() + 60 * options.budget
    begun, left = time.monotonic(), 0
    before = len(read(options.record))
    for seed in range(SEED, SEED + options.repeats):
        for network in options.networks:
            try:
                left += train_all(rows, network, seed, options, end)
            except ShapingError as error:
                sys.exit(f"{error}\nThe trainings so far are in {options.record}; run the same command again to go on.")
    if left:
        made = len(read(options.record)) - before
        more = f", about {(time.monotonic() - begun) / made * left / 60:.0f} minutes" if made else ""
        print(f"{left} trainings are left{more}: run it again", file=sys.stderr)
    found = [
        training
        for training in read(options.record)
        if training["network"] in options.networks
        and training["seed"] < SEED + options.repeats
        and training["outcome"] != "failed"
    ]
    text = make_page(rows, found, options)
    print(text)
    if options.write:
        PAGE.write_text(text, "utf-8")


def list_rows(names: Sequence[str], ranks: int) -> list[Row]:
    """The rows of these methods, and of what one of them is compared with."""
    found = []
    for name in names:
        row = SPECIAL.get(name, Row(name))
        try:
            row.resolve().check(row.ranks or ranks)
        except MethodError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        found.append(row)
    return [*found, *(row for row in EXTRA if any(other.task == row.task for other in found))]


def train_all(rows: Sequence[Row], network: str, seed: int, options: argparse.Namespace, end: float) -> int:
    """Train every row that the record does not have yet. How many are left at `end`."""
    done = [one for one in read(options.record) if one["outcome"] != "failed"]
    known = {(one["row"], one["network"], one["ranks"], one["seed"]) for one in done}
    sized = [(row, row.ranks or options.ranks) for row in rows]
    missing = [(row, ranks) for row, ranks in sized if (row.title, network, ranks, seed) not in known]
    if not missing or time.monotonic() > end:
        return len(missing)
    places = max(ranks + row.resolve().values.get("servers", 0) for row, ranks in missing)
    shaped = None if network == UNSHAPED else ShapedNetwork(parse_network(network), places)
    try:
        if shaped is not None:
            shaped.verify()
        for number, (row, ranks) in enumerate(missing):
            if time.monotonic() > end:
                return len(missing) - number
            training = train(shaped, row, network, ranks, seed)
            with options.record.open("a") as file:
                file.write(json.dumps(training) + "\n")
        return 0
    finally:
        if shaped is not None:
            shaped.close()


def train(shaped: ShapedNetwork | None, row: Row, network: str, ranks: int, seed: int) -> Training:
    """What became of one training."""
    found = Training(row=row.title, network=network, ranks=ranks, seed=seed, load=os.getloadavg()[0])
    method = row.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changes = {
            "MLBENCH_METHOD": json.dumps({"name": row.name, **row.options}),
            "MLBENCH_SEED": str(seed),
        }
        if shaped is not None:
            changes |= {"MASTER_ADDR": worker_address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        parameters = load_task(row.task).resolve("tiny", row.parameters)
        every = environments(ranks, folder, parameters, changes, method.values.get("servers", 0))
        started = [
            fork_rank(
                f"task_images.{row.task}",
                environment,
                [str(folder / f"out-{rank}"), str(folder / f"err-{rank}")],
                None if shaped is None else partial(shaped.enter_worker, rank),
            )
            for rank, environment in enumerate(every)
        ]
        ended = read_ended(wait(started), folder)
    if any(one.code for one in ended):
        return {**found, "outcome": "failed", "why": f"{[one.code for one in ended]} {ended[0].stderr[-300:]}"}
    result = ended[0].result
    communication = result["details"]["communication"]
    return {
        **found,
        "outcome": result["outcome"],
        "value": result["goal"]["value"],
        "updates": result["updates"],
        "seconds": result["wall_seconds"],
        "samples_per_second": result["samples"] / result["training_seconds"],
        "bytes_per_update": communication.get("bytes", 0.0) / max(1.0, communication.get("updates", 1.0)),
        "check_seconds": float(seconds[1]) if (seconds := CHECK.search(ended[0].stdout)) else 0.0,
    }


def wait(pids: Sequence[int]) -> list[int]:
    """Exit codes of all ranks. When one has failed, the others get MIN_SECONDS; nobody gets more than MAX_SECONDS."""
    codes: dict[int, int] = {}
    end = time.monotonic() + MAX_SECONDS
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    end = min(end, time.monotonic() + MIN_SECONDS)
        if time.monotonic() > end:
            for pid in set(pids) - set(codes):
                os.kill(pid, 9)
            end = float("inf")
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def read(path: Path) -> list[Training]:
    """The trainings in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the page ---------------------------------------------------------------------------------------------------------


def make_page(rows: Sequence[Row], trainings: Sequence[Training], options: argparse.Namespace) -> str:
    networks = options.networks
    heads = ["method", "updates to the goal", "bytes handed over per update"]
    heads += [f"{network}: seconds to the goal | samples per second" for network in networks]
    table = [f"| {' | '.join(heads)} |", "|" + "---|" * (3 + 2 * len(networks))]
    for row in rows:
        own = [one for one in trainings if one["row"] == row.title]
        if own:
            table.append(f"| {' | '.join(make_cells(row, own, networks))} |")
    loads = [one["load"] for one in trainings] or [0.0]
    checks = [one["check_seconds"] for one in trainings if one.get("check_seconds")] or [0.0]
    notes = [f"- {row.title}: {row.why}." for row in rows if row.why]
    facts = {
        "ranks": options.ranks,
        "repeats": len({one["seed"] for one in trainings}),
        "cores": os.cpu_count(),
        "low": min(loads),
        "high": max(loads),
        "warning": BUSY if max(loads) > QUIET_LOAD * options.ranks else "",
        "first": min(checks),
        "last": max(checks),
        "networks": " and ".join(f"`{network}`" for network in networks),
    }
    return TEXT.format(table="\n".join(table), notes="\n".join(notes), **facts)


def make_cells(row: Row, own: Sequence[Training], networks: Sequence[str]) -> list[str]:
    reached = [one for one in own if one["outcome"] == "goal_reached"]
    # Seeds decide the updates, and not the network: a seed counts once, unless its trainings differ.
    updates = sorted({(one["seed"], one["updates"]) for one in reached})
    size = estimate([one["bytes_per_update"] for one in own]).mean
    title = row.title + (" \\*" if row.why else "")
    cells = [title, describe([count for _, count in updates], 0) if updates else "missed"]
    if len(reached) < len(own):
        cells[1] += f" ({len(reached)} of {len(own)} trainings)"
    cells.append("not counted" if row.name in UNCOUNTED else f"{size:,.0f}")
    for network in networks:
        there = [one for one in own if one["network"] == network]
        cells.append(describe([one["seconds"] for one in there if one["outcome"] == "goal_reached"], 1))
        cells.append(describe([one["samples_per_second"] for one in there], 0))
    return cells


def describe(values: Sequence[float], digits: int) -> str:
    """The mean, and the 95 % interval if there are at least three."""
    if not values:
        return "–"
    found = estimate(values)
    if found.low is None or found.high is None:
        return f"{found.mean:,.{digits}f}"
    return f"{found.mean:,.{digits}f} ({found.low:,.{digits}f} to {found.high:,.{digits}f})"


QUIET_LOAD = 1.5  # per rank
BUSY = """ The ranks account for only part of that load, so other programs shared the machine: **do not compare methods
by these seconds and rates**, whose intervals are wide for the same reason. Updates and bytes do not depend on it."""
TEXT = """\
# What methods reach

Every [method](../how-to/methods.md) trains the preset `tiny` of the digits (ResNet-8, 78,042 parameters, 80 %
accuracy) on {ranks} ranks, over shaped networks of {networks} (rate of a link and one-way delay). Seeds: {repeats}.
`python -m benchmarks.goals --write` writes this page, by default for two networks and three seeds. Cells are means,
with ± half of the 95 % interval for three seeds. Updates and bytes are the same on every machine up to rounding.

{table}

Rows with \\* differ from the default settings, so that each row shows what is characteristic of its method:

{notes}

*Bytes* are what a rank hands over to a collective or server; the formula of each (`mlbench methods NAME`) gives
the part that a ring sends. `dear` hands everything over twice; with gloo, whose reduce-scatter is an all-reduce, it
sends 1.5 times as much as `bsp`. `dpsgd` and `choco` send to each neighbor. `localsgd` averages after every fourth
update and at each validation. `topk` (without error feedback) and `noop` reach the goal only because the task is
easy. With 0.1 % of the entries (`--set comm.density=0.001`), `eftopk` reaches it after 8
epochs, while `topk` has 58 to 67 % after all 20. Seconds include validations, but not the self-check, which takes
{first:.2f} to {last:.2f} s. Small messages are expensive here;
[Figures](figures.md#networks) shows the effect of a network on large ones (`predict.py`).

The machine has {cores} cores for {ranks} ranks and their servers. Its load was {low:.0f} to {high:.0f} when the
trainings started.{warning}
"""


if __name__ == "__main__":
    main()
