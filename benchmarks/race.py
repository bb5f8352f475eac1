"""The race in small: Muon against AdamW on shards of llm.c's form, to a goal.

    python -m benchmarks.race [REPEATS [STEPS]]

The text that comes with Python (PSF license) becomes three training shards and one for validation, one token a byte.
The tiny decoder trains on them with the loader, schedules and optimizers of the presets `llmc` and `modern`. Printed:
sequences to the goal with their 95 % interval over seeds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mlbench_cli.results.analysis.stats import estimate
from mlbench_cli.tasks.catalog import load_task
from task_images.contract import parse_event
from task_images.language.shards import prepare_shards, write_shard
from task_images.language.tokens import python_text

ROOT = Path(__file__).parents[1]
GOAL, BATCH = 2.7, 32
COMMON: dict[str, Any] = {
    "data": "shards",
    "order": "files",
    "model": "tiny",
    "vocabulary": 256,
    "compile": "no",
    "precision": "fp32",
    "sequence_length": 64,
    "global_batch": BATCH,
    "micro_batch": 0,
    "evaluate_every": 20,
    "validation_sequences": 256,
    "goal_full": 0.01,  # no run ends at the goal: the rule wants the loss of the last update
    "goal_light": 0.01,
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llmc: AdamW, cosine": ("spec", {"learning_rate": 0.005, "warmup_steps": 20}),
    "modern's schedule, AdamW": ("spec", {"learning_rate": 0.005, "schedule": "linear", "warmup_steps": 0}),
    "the same, Muon": (
        "spec",
        {"learning_rate": 0.005, "schedule": "linear", "warmup_steps": 0, "optimizer": "muon", "matrix_rate": 0.02},
    ),
}


def main() -> None:
    given = [int(word) for word in sys.argv[1:3]]
    repeats, steps = (*given, *(3, 200)[len(given) :])
    with tempfile.TemporaryDirectory(prefix="mlbench-race-") as name:
        folder = Path(name)
        write_shards(folder)
        print(f"goal {GOAL} nats a byte, {steps} updates of {BATCH} sequences of 64, {repeats} seeds")
        for way, (preset, changes) in WAYS.items():
            runs = [train(folder, preset, {**COMMON, **changes, "steps": steps}, seed) for seed in range(repeats)]
            reached = [BATCH * update for update in (find_goal(curve) for curve in runs) if update is not None]
            print(f"{way:<26} sequences to the goal: {describe(reached, repeats)}", flush=True)


def write_shards(folder: Path) -> None:
    """Three shards for training, each begun by the token that ends a document, and one for validation."""
    corpus = python_text()
    for number, part in enumerate((corpus.valid, *np.array_split(corpus.train, 3))):
        tokens = np.concatenate(([corpus.end or 0], part))
        write_shard(folder / f"python_{'train' if number else 'val'}_{number:06d}.bin", tokens)
    prepare_shards(folder)


def train(folder: Path, preset: str, changes: dict[str, Any], seed: int) -> list[dict[str, float]]:
    """The curve of one run."""
    variables = {
        "MLBENCH_DEVICE": "cpu",
        "MLBENCH_DATA_DIR": str(folder),
        "MLBENCH_OUTPUT_DIR": str(folder),
        "MLBENCH_SEED": str(seed),
        "MLBENCH_PARAMETERS": json.dumps(load_task("gpt_pretraining").resolve(preset, changes)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "task_images.run", "gpt_pretraining"]
    given = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-1000:] + done.stderr)
    events = (parse_event(line) for line in done.stdout.splitlines())
    [result] = [event for event in events if event and event["event"] == "result"]
    curve: list[dict[str, float]] = result["details"]["curve"]
    return curve


def find_goal(curve: list[dict[str, float]]) -> float | None:
    """The update of the first validation at or below the goal."""
    return next((point["update"] for point in curve if point["loss"] <= GOAL), None)


def describe(values: list[float], repeats: int) -> str:
    if len(values) < repeats:
        return f"reached by {len(values)} of {repeats} runs"
    found = estimate(values)
    margin = "" if found.low is None or found.high is None else f" ({found.low:.0f} to {found.high:.0f})"
    return f"{found.mean:.0f}{margin}"


if __name__ == "__main__":
    main()
