"""How long sealing and verifying an archive with many log lines takes, against sha256sum of the same bytes.

    python benchmarks/verify.py [LINES] [ROUNDS]

One log line of a hundred is an event, as in a training that reports every hundredth step. Ratios are medians over
rounds in which both commands run once, one after the other. The budget is 10x.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.archive.verify import verify
from task_images.contract import format_event

BUDGET = 10.0
START = 1_760_000_000.0


def main() -> None:
    lines = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as home:
        run = write_run(Path(home) / "run", lines)
        sealing = measure(lambda: seal_run(run))
        size = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
        ratios, seconds = [], []
        for _ in range(rounds):
            plain = measure(lambda: sha256sum(run.folder))
            checked = measure(lambda: check(run.folder))
            ratios.append(checked / plain)
            seconds.append(checked)
        print(f"{lines} log lines, {size / 1e6:.0f} MB: judged and sealed in {sealing:.2f} s")
        print(f"verified in {statistics.median(seconds):.2f} s, {statistics.median(ratios):.1f}x of sha256sum", end="")
        print(f" (from {min(ratios):.1f}x to {max(ratios):.1f}x; budget {BUDGET:g}x)")


def seal_run(run: Run) -> None:
    """Judge and seal a run that `write_run` has written."""
    state = WorkerState(0, "succeeded", exit_code=0, started=START, finished=START + 100)
    seal(run, Observation(START + 100, (state,), (), Ending.EXITED))


def write_run(folder: Path, lines: int) -> Run:
    spec = RunSpec("long-1", "local", "local", "custom", "custom", ("prog",), "gloo", 1)
    run = Run("0123456789ab", spec, folder, "2025-10-09T08:53:19.000Z")
    write_run_document(run)
    (folder / "logs").mkdir()
    with open(folder / "logs" / "rank-0.log", "w", encoding="ascii") as log:
        for number in range(lines):
            if number % 100 == 0:
                time_ = START + number / lines * 100
                fields = {"rank": 0, "time": time_, "name": "train_loss", "value": 1 / (number + 1), "step": number}
                log.write(format_event({"v": 1, "event": "metric", **fields}) + "\n")
            else:
                log.write(f"step {number} of {lines}: loss {1 / (number + 1):.9f}, 1234.5 samples/s, data wait 0.1 %\n")
    return run


def check(folder: Path) -> None:
    if problems := verify(folder).problems:
        raise SystemExit(f"the archive does not verify: {problems[0]}")


def sha256sum(folder: Path) -> None:
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder, check=True)


def measure(action: object) -> float:
    begun = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
