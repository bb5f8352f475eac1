"""Replicas and shards against one process: the greatest difference of losses over 8 updates of the tiny decoder.

    .venv/bin/python benchmarks/layouts.py

Real processes with gloo; AdamW; the ways are those of tests/contract/task_images/gpt_pretraining. Wanted: 5e-6 in
fp32, 5e-3 in bf16. Printed as a table in Markdown.
"""

import sys
import tempfile
from pathlib import Path

# As a script the repository is not on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.contract.task_images.gpt_pretraining.test_layouts import (
    EQUAL,
    LAYOUTS,
    curve_of,
    measure_difference,
    train,
)
from tests.contract.task_images.ranks import RankServer

BF16 = {"method": "fsdp2", "precision": "bf16"}
EQUAL_BF16 = 5e-3


def main() -> int:
    ranks, worst = RankServer(), 0.0
    print("| ranks | parameters | greatest difference |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="mlbench-layouts-") as folder:
        [alone] = train(ranks, 1, Path(folder) / "alone")
        expected = curve_of(alone)
        for number, (size, changes) in enumerate([*LAYOUTS, (2, BF16)]):
            [first, *_] = train(ranks, size, Path(folder) / str(number), **changes)
            found = measure_difference(first, expected)
            worst = max(worst, found / (EQUAL_BF16 if changes is BF16 else EQUAL))
            words = ", ".join(f"`{name}={str(value).lower()}`" for name, value in changes.items())
            print(f"| {size} | {words} | {found:.1e} |", flush=True)
    ranks.close()
    return worst > 1


if __name__ == "__main__":
    sys.exit(main())
