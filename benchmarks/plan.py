"""A blind test of plans on this machine: plan from two calibrations, then measure cells that are drawn at random.

    python -m benchmarks.plan --folder FOLDER [--minutes 20] [--cells 24] [--seed N]
    python -m benchmarks.plan --count [RUN]

Cells are workers x methods x shaped networks x batch sizes per rank of digits_resnet (preset tiny): 219 by default. Two
calibrated runs of two workers, at the smallest and the largest batch, are all that predictions are made from, before
the first cell runs. Then --cells of them, drawn by --seed, train to the goal, one after the other. Prints predicted and
measured seconds of training to the goal, the median error, the rank correlation, how much longer the plan's best of the
drawn cells took than their measured best, and the total time. Learning rates are in proportion to the global batch. The
exit code is 1 if the median error is above 15 %, the correlation below 0.9, or the best more than 10 % off.

Every cell is a run with an archive in FOLDER, so the same command goes on after an interruption; no cell starts after
--minutes. Networks are slow, so that communication and not the processor decides: ranks that share a core are predicted
to compute as much longer as there are more ranks than cores. Nothing else should run: on a machine with other load
neither steps nor shaped networks are what they are on an idle one. An empty network is the machine's own. With --count
no cell runs: candidates of four example plans from a calibrated run, which is made if none is named, are counted and
timed, and the shares of their figures that are measured, published and guessed are printed. The exit code is 1 if
10,000 candidates take more than 5 s of CPU time.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlbench_cli.model.network import parse_network
from mlbench_cli.predict.samples import GoalPoint, SamplesToGoal, choose_model
from mlbench_cli.simulator.calibration import Calibration, find_link, parse_calibration
from mlbench_cli.simulator.predict import Scenario
from mlbench_cli.simulator.predict import predict as predict_step
from task_images.comm.presets import resolve
from task_images.harness.cores import effective_cores

ROOT = Path(__file__).parents[1]
MAX_ERROR, MIN_CORRELATION, MAX_REGRET = 0.15, 0.9, 0.10
MAX_PLANNING = 5.0  # CPU seconds for 10,000 candidates
MIN_COUNT = 1000  # candidates of a plan whose time counts
EXAMPLES = (
    ("all clouds and spot machines", "--spot"),
    ("all clouds, spot machines and exact methods", "--spot --method any"),
    ("GKE", "--clouds gke"),
    ("this machine", "--clouds here"),
)


@dataclass(frozen=True)
class Cell:
    """One way to train: `batch` samples per rank and step."""

    workers: int
    method: str
    network: str
    batch: int


class Lab:
    """Runs of digits_resnet in a store of their own."""

    def __init__(self, home: Path, given: argparse.Namespace) -> None:
        self._home, self._given = home, given

    def run(self, name: str, cell: Cell, *more: str) -> Path | None:
        """Train to the goal; the run's folder, or None if it did not get there."""
        given = self._given
        total = cell.workers * cell.batch
        command = [
            *(sys.executable, "-m", "mlbench_cli", "run", name, str(cell.workers), "--task", "digits_resnet"),
            *("--preset", "tiny", "--yes", "--share-machine", "--num-cpus", "1", "--seed", str(given.seed)),
            *("--set", f"batch_size={cell.batch}", "--set", f"goal_full={given.goal:g}", "--set", "epochs=100"),
            # With several workers the task itself goes up to `workers` times its rate.
            *("--set", f"learning_rate={given.rate * total / 64 / cell.workers:g}", "--method", cell.method, *more),
        ]
        if cell.workers > 1 and cell.network:
            command += ["--network", cell.network]
        environment = {**os.environ, "MLBENCH_HOME": str(self._home)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode:
            print(f"{name}: exit code {done.returncode}: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return None
        for path in (self._home / "runs").glob("*/result.json"):  # an interrupted run has none
            result = json.loads(path.read_text("utf-8"))
            if result["run"].partition("-try")[0] == f"{name}-{cell.workers}" and result["outcome"] == "goal_reached":
                return path.parent
        return None


def read_result(folder: Path) -> tuple[float, float]:
    """Samples and seconds of training until the goal, without validations."""
    result = json.loads((folder / "result.json").read_text("utf-8"))
    spent = result["task_seconds"]["training"] + result["timings"]["data_wait"]["rank0"]
    return float(result["samples"]), float(spent)


def predict(cell: Cell, calibration: Calibration, result: dict[str, Any], samples: SamplesToGoal) -> float:
    """Seconds of training until the goal."""
    work = scale_batch(calibration, cell.batch / calibration.batch, max(1.0, cell.workers / effective_cores()))
    link, error = find_link(calibration, result.get("network"))
    shape = parse_network(cell.network) if cell.workers > 1 and cell.network else None
    method = resolve(cell.method)
    if cell.workers == 1:
        step = work.workload.seconds
    else:
        step = predict_step(work, link, error, Scenario(cell.workers, method, shape)).step.seconds
    total = cell.workers * cell.batch
    needed = samples.samples(total)
    assert needed is not None
    return needed / total * step


def scale_batch(calibration: Calibration, factor: float, crowd: float) -> Calibration:
    """The same with another batch per rank, and `crowd` ranks on each core; the update costs the same for any batch."""
    low, middle, high = (
        replace(work.scale(factor * crowd), optimizer=work.optimizer * crowd)
        for work in (calibration.low, calibration.workload, calibration.high)
    )
    batch = int(calibration.batch * factor)
    return replace(calibration, workload=middle, low=low, high=high, batch=batch, buckets=())


def correlate_ranks(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(place)) for place in range(len(values))]

    return statistics.correlation(ranks(first), ranks(second))


def test(given: argparse.Namespace) -> int:
    """Plan, measure, compare."""
    batches = [int(word) for word in given.batches.split(",")]
    cells = [
        Cell(int(workers), method, network, batch)
        for workers, method, network, batch in itertools.product(
            given.workers.split(","), given.methods.split(","), given.networks.split(";"), batches
        )
        if int(workers) > 1 or (method, network) == (given.methods.split(",")[0], given.networks.split(";")[0])
    ]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab((given.folder or Path(folder)).resolve(), given)
        calibrated = []
        for batch in (batches[0], batches[-1]):
            path = lab.run(f"cal{batch}", Cell(2, "bsp", "", batch), "--calibrate")
            if path is None:
                return 1
            calibrated.append(path)
        documents = [json.loads((path / "result.json").read_text("utf-8")) for path in calibrated]
        points = [
            GoalPoint(2 * batch, read_result(path)[0])
            for batch, path in zip((batches[0], batches[-1]), calibrated, strict=True)
        ]
        samples = choose_model("digits_resnet", points, None)
        whole = [parse_calibration((path / "output/rank-0/calibration.json").read_bytes()) for path in calibrated]
        print(f"{len(cells)} cells, load {os.getloadavg()[0]:.1f}; {samples.note}", flush=True)
        planned = {}
        for cell in cells:
            near = min(range(2), key=lambda number: abs(whole[number].batch - cell.batch))
            planned[cell] = predict(cell, whole[near], documents[near], samples)
        drawn = random.Random(given.seed).sample(cells, min(given.cells, len(cells)))
        measured = {}
        print(
            f"{'workers':>7} {'method':>10} {'network':>14} {'batch':>5} {'planned':>8} {'measured':>8}"
            f" {'error':>7} load"
        )
        for cell in drawn:
            if time.monotonic() - begun > 60 * given.minutes:
                print(f"{given.minutes:g} minutes are over: the same command with --folder goes on")
                break
            path = lab.run(f"c{zlib.crc32(repr(cell).encode()):08x}", cell)
            if path is None:
                continue
            measured[cell] = read_result(path)[1]
            error = planned[cell] / measured[cell] - 1
            row = f"{cell.workers:>7} {cell.method:>10} {cell.network:>14} {cell.batch:>5}"
            row += f" {planned[cell]:>8.2f} {measured[cell]:>8.2f} {error:>+7.1%}"
            print(f"{row} {os.getloadavg()[0]:.1f}", flush=True)
    print(f"total time {(time.monotonic() - begun) / 60:.1f} min")
    if len(measured) < 3:
        print("fewer than three cells reached the goal")
        return 1
    errors = [abs(planned[cell] / seconds - 1) for cell, seconds in measured.items()]
    correlation = correlate_ranks([planned[cell] for cell in measured], list(measured.values()))
    chosen = min(measured, key=planned.__getitem__)
    regret = measured[chosen] / min(measured.values()) - 1
    median = statistics.median(errors)
    print(
        f"median error {median:.1%}, worst {max(errors):.1%}, rank correlation {correlation:.2f}, {len(measured)} cells"
    )
    print(f"the plan's best takes {regret:.1%} longer than the best measured")
    return 1 if median > MAX_ERROR or correlation < MIN_CORRELATION or regret > MAX_REGRET else 0


def count(run: str, given: argparse.Namespace) -> int:
    """Candidates of example plans, what they take, and what their figures rest on; without a run, one is calibrated."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if not run:
            path = Lab(Path(folder), given).run("cal", Cell(2, "bsp", "", 64), "--calibrate")
            if path is None:
                return 1
            run, environment["MLBENCH_HOME"] = "cal-2", folder
        return int(max([_time_plan(run, given.task, *example, environment) for example in EXAMPLES]) > MAX_PLANNING)


def _time_plan(run: str, task: str, what: str, words: str, environment: dict[str, str]) -> float:
    """CPU seconds for 10,000 candidates; 0 for a plan of few, most of which is the start of Python."""
    command = [sys.executable, "-m", "mlbench_cli", "plan", task, "--from", run, *words.split(), "-o", "json"]
    begun, before = time.monotonic(), os.times()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    after = os.times()
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout)
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    shares = ", ".join(f"{basis} {share:.0%}" for basis, share in found["bases"].items())
    each = 10_000 * spent / found["candidates"]
    print(
        f"{what}: {found['candidates']} candidates, {time.monotonic() - begun:.1f} s, {spent:.1f} s of CPU time"
        f" ({each:.1f} s for 10,000); figures: {shares}",
        flush=True,
    )
    return each if found["candidates"] >= MIN_COUNT else 0.0


def main() -> int:
    """Test, or count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,3,4")
    parser.add_argument("--methods", default="bsp,wfbp,fusion,mgwfbp,dear,fp16")
    parser.add_argument("--networks", default="20mbit,10ms;50mbit,10ms;100mbit,5ms;200mbit,5ms", help="separated by ;")
    parser.add_argument("--batches", default="16,32,128")
    parser.add_argument("--cells", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps all runs, to go on with; default: a temporary one")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which no cell starts")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate at a global batch of 64")
    parser.add_argument("--goal", type=float, default=93.0)
    parser.add_argument(
        "--count", nargs="?", const="", metavar="RUN", help="count and time candidates instead, from a calibrated run"
    )
    parser.add_argument("--task", default="digits_resnet", help="with --count")
    given = parser.parse_args()
    return test(given) if given.count is None else count(given.count, given)


if __name__ == "__main__":
    sys.exit(main())
