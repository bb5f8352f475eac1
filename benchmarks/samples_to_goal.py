"""How well samples to a goal are predicted for batch sizes that were left out.

    python -m benchmarks.samples_to_goal [--task TASK] [--batches N,N,...] [--seeds N,N,N] [--rate RATE] [--goal VALUE]
    python -m benchmarks.samples_to_goal --task epsilon_logistic_regression --rate 1 --goal 92
    python -m benchmarks.samples_to_goal --task gpt_pretraining --batches 4,8,16,32,64,128 --rate 0.003 --power 0.5 \
        --goal 2.8 --length 4000 --set evaluate_every=5 --set validation_sequences=128

Runs TASK (digits_resnet, preset tiny) with `mlbench run` at each batch size with each seed, one worker on one CPU, at a
learning rate in proportion to the batch (or to a --power of it), and averages the samples to the goal over the seeds.
Then every batch size in turn, and every pair of neighbors, is left out, and predicted from the others by
`mlbench_cli.predict.samples`. Prints a row for each prediction and the median error; the exit code is 1 if that is
above 15 %.

Samples do not depend on how busy the machine is, so any machine will do. Some four minutes by default.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from mlbench_cli.predict.samples import GoalPoint, choose_model, fit
from mlbench_cli.tasks.catalog import load_catalog

MAX_ERROR = 0.15
ROOT = Path(__file__).parents[1]


def measure(task: str, batch: int, seed: int, rate: float, extra: Sequence[str], home: Path) -> float | None:
    """Samples until the run reached its goal; None if it did not."""
    name = f"b{batch}-s{seed}"
    command = [
        *(sys.executable, "-m", "mlbench_cli", "run", name, "1", "--task", task, "--preset", "tiny", "--yes"),
        *("--seed", str(seed), "--num-cpus", "1", "--share-machine"),
        *("--set", f"learning_rate={rate:g}", *_batch(task, batch), *extra),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MLBENCH_HOME": str(home)}, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        print(f"{name}: exit code {done.returncode}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    for path in (home / "runs").glob("*/result.json"):
        result = json.loads(path.read_text("utf-8"))
        if result["run"].startswith(name) and result["outcome"] == "goal_reached":
            return float(result["samples"])
    return None


def _batch(task: str, batch: int) -> list[str]:
    """The options for a global batch of one worker, in a single pass."""
    if "global_batch" not in load_catalog()[task].parameters:
        return ["--set", f"batch_size={batch}"]
    return ["--set", f"global_batch={batch}", "--set", "micro_batch=0"]


def folds(batches: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The batch sizes that are left out together: each alone, and each two neighbors."""
    yield from ((batch,) for batch in batches)
    yield from pairwise(batches)


def main() -> int:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="digits_resnet")
    parser.add_argument("--batches", default="16,32,64,128,256,512")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate at a batch of 64")
    parser.add_argument("--goal", type=float, default=93.0)
    parser.add_argument("--power", type=float, default=1.0, help="of the batch, to which the rate is in proportion")
    parser.add_argument("--length", type=int, default=100, help="most epochs, or steps")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="further parameters; repeatable"
    )
    parser.add_argument("--out", type=Path, help="write the points as JSON")
    given = parser.parse_args()
    batches = [int(word) for word in given.batches.split(",")]
    seeds = [int(word) for word in given.seeds.split(",")]
    length = "epochs" if "epochs" in load_catalog()[given.task].parameters else "steps"
    extra = ["--set", f"{length}={given.length}", "--set", f"goal_full={given.goal:g}"]
    extra += [word for pair in given.set for word in ("--set", pair)]
    points: dict[int, GoalPoint] = {}
    print(f"{'batch':>6} {'seeds':>5} {'samples to goal':>15} {'least':>9} {'most':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches:
            found = [
                measure(given.task, batch, seed, given.rate * (batch / 64) ** given.power, extra, Path(folder))
                for seed in seeds
            ]
            reached = [value for value in found if value is not None]
            if not reached:
                print(f"{batch:>6} {0:>5} goal not reached", flush=True)
                continue
            points[batch] = GoalPoint(batch, statistics.fmean(reached))
            print(
                f"{batch:>6} {len(reached):>5} {points[batch].samples:>15.0f}"
                f" {min(reached):>9.0f} {max(reached):>9.0f}",
                flush=True,
            )
    if len(points) < 4:
        print("fewer than four batch sizes reached the goal")
        return 1
    whole = fit(list(points.values()))
    print(f"all points: E_min {whole.minimum:.0f} samples, B_crit {whole.critical:.0f}, fit {whole.error:.1%} off")
    errors = []
    print(f"{'left out':>10} {'batch':>6} {'measured':>9} {'predicted':>9} {'error':>7}")
    for left_out in folds(sorted(points)):
        model = choose_model(given.task, [points[batch] for batch in points if batch not in left_out], None)
        for batch in left_out:
            predicted = model.samples(batch)
            assert predicted is not None
            error = predicted / points[batch].samples - 1
            errors.append(abs(error))
            name = "+".join(map(str, left_out))
            print(f"{name:>10} {batch:>6} {points[batch].samples:>9.0f} {predicted:>9.0f} {error:>+7.1%}")
    median = statistics.median(errors)
    print(f"median error {median:.1%}, worst {max(errors):.1%}, {len(errors)} predictions")
    if given.out:
        given.out.write_text(json.dumps([vars(point) for point in points.values()], indent=1) + "\n", "utf-8")
    return 1 if median > MAX_ERROR else 0


if __name__ == "__main__":
    sys.exit(main())
