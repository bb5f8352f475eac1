"""Curves of every task, kept as files, so that a change of the code cannot change a training unseen.

`python -m tests.contract.task_images.golden` takes them again on two ranks; test_golden.py compares.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.tasks.catalog import load_task
from tests.contract.task_images.ranks import RankServer, share_forks

FOLDER = Path(__file__).with_name("curves")
MEASURED = ("epoch", "seconds", "samples_per_second")  # of a point of a curve: not part of the training
IMAGES = {"training_images": 64, "validation_images": 32, "epochs": 2, "batch_size": 16}
STEPS = {"steps": 3, "evaluate_every": 2, "warmup_steps": 1, "validation_sequences": 16}
# Three updates without a validation: theirs takes a minute.
BLOCKS = {"blocks": 1, "blocks_after": 1, "block_updates": 3}
# Changes of each task's preset `tiny`.
TASKS: Mapping[str, Mapping[str, Any]] = {
    "cifar10_resnet20": IMAGES,
    "cifar10_resnet20_ddp": IMAGES,
    "digits_resnet": {"epochs": 2, "batch_size": 128},
    "epsilon_logistic_regression": {"training_rows": 400, "validation_rows": 100, "epochs": 2},
    "imagenet_resnet": {"training_images": 64, "validation_images": 32, "steps": 2, "epochs": 1, "warmup_epochs": 0},
    "mnist": IMAGES,
    "gpt_pretraining": STEPS,
    "bert_pretraining": STEPS,
    "wikitext2_awd_lstm": BLOCKS,
    "wmt16_gnmt": BLOCKS,
    "wmt17_transformer": BLOCKS,
}


def take_curve(ranks: RankServer, task: str, folder: Path) -> list[dict[str, float]]:
    """The points of a training on two ranks, with seed 42."""
    parameters = load_task(task).resolve("tiny", TASKS[task])
    ended = ranks.run(" ".join(load_task(task).command[2:]), 2, folder, parameters)
    assert [one.code for one in ended] == [0, 0], ended[0].stderr[-2000:]
    details = ended[0].result["details"]
    points = details["curve"] or [{"train_loss": details["train_loss"]}]
    return [{name: value for name, value in point.items() if name not in MEASURED} for point in points]


def read_curve(name: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def main() -> None:
    """Take all curves again, or those that are named on the command line."""
    ranks = RankServer(share_forks())
    for name in sys.argv[1:] or TASKS:
        with tempfile.TemporaryDirectory() as folder:
            curve = take_curve(ranks, name, Path(folder))
        rows = ",\n ".join(json.dumps(point) for point in curve)
        (FOLDER / f"{name}.json").write_text(f"[{rows}]\n", "utf-8")
        print(name, curve[-1])
    ranks.close()


if __name__ == "__main__":
    main()
