"""Every method against its paper's pseudo-code: the matrix method x setting x ranks, in Markdown.

    .venv/bin/python -m benchmarks.equality [--write]

Writes docs/explanation/methods-equality.md with --write. Methods run on threads of this process, torch's own engines on
real ranks over gloo. The references are in tests/unit/task_images/comm/references.py. Ends with 1 if a case differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

# As a script the repository is not on the path; with -m it is.
sys.path.insert(0, str(Path(__file__).parents[1]))

from task_images.comm.methods import NATIVE
from tests.contract.task_images.ranks import RankServer
from tests.unit.task_images.comm.equality import (
    ALONE,
    DIFFERENCES,
    SETTINGS,
    SIZES,
    UNCOMMON,
    Cell,
    describe,
    judge,
    list_methods,
)

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "methods-equality.md"
Cells = dict[tuple[str, str, int], str]
HEAD = """\
# Methods and their papers

Does each method compute what its paper says? Tests train every method and compare it with the pseudo-code of the
paper, written in NumPy for one process (`tests/unit/task_images/comm/references.py`). A case has four tensors whose
gradients differ in scale by a factor of 1,000, 12 updates, and a learning rate that is halved halfway. The settings
are SGD with momentum, AdamW with weight decay, SGD with weight decay, gradient clipping by norm, and fp16 with a
growing loss scale. In the last one, two updates overflow: one in a single entry of one rank, one in a whole tensor.
Numbers in parentheses are numbers of ranks. `python -m benchmarks.equality --write` writes this page.

- *equal*: to 1e-5, in float64 (scales are sent as float32).
- *documented*: equal to a reference that differs from the paper as described below the table.
- *refused*: mlbench rejects the combination before the first update, with the reason.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args()
    text = HEAD + make_table(collect()) + "\n" + list_differences()
    print(text)
    if options.write:
        PAGE.write_text(text, "utf-8")
    sys.exit(Cell.different.value in text)


def collect() -> Cells:
    """What every case is."""
    found: Cells = {}
    for method in list_methods():
        for name in SETTINGS if method.engine not in NATIVE else ():
            for size in SIZES:
                found[method.name, name, size] = judge(method, name, size).cell.value
    server = RankServer()
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            ended = server.run("tests.contract.task_images.comm.equality_ranks", size, Path(folder), {})
        for line in ended[0].stdout.splitlines():
            if line.startswith("CELL "):
                _, method_name, name, cell, *_ = line.split()
                found[method_name, name, size] = cell
    server.close()
    return found


def make_table(cells: Cells) -> str:
    lines = [f"| method | {' | '.join(SETTINGS)} |", f"|---|{'---|' * len(SETTINGS)}"]
    for method in list_methods():
        row = [describe({size: cells[method.name, name, size] for size in SIZES}) for name in SETTINGS]
        lines.append(f"| `{method.name}` | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def list_differences() -> str:
    names = ", ".join(f"`{name}`" for name in UNCOMMON)
    rows = [f"- `{name}`: {text}" for name, text in DIFFERENCES.items()]
    return "\n".join([*rows, f"- {names}, under *clip* and *fp16*: {ALONE}"]) + "\n"


if __name__ == "__main__":
    main()
