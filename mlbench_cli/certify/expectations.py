"""Published figures of clusters: what one may expect of the same machines, fabric, number of nodes and size.

They are not promises of a seller, and judge the cluster, never a node. `expectations.csv` has those that are shipped,
each with its source. A file of one's own has the same fields as JSON or YAML: a list of objects, of which machine,
fabric and date may be left out.
"""

import csv
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.util.yaml_text import read_yaml

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LEAST_SHARE = 0.75  # of a published figure: a lower expectation would accept what is broken
_FIELDS = ("operation", "bytes", "nodes", "value", "source")


@cache
def published() -> tuple[Mapping[str, Any], ...]:
    """The shipped figures."""
    path = Path(__file__).with_name("expectations.csv")
    with open(path, encoding="utf-8", newline="") as file:
        return tuple(
            {**row, "nodes": int(row["nodes"]), "bytes": int(row["bytes"]), "value": float(row["value"])}
            for row in csv.DictReader(file)
        )


def read_expectations(path: Path) -> list[dict[str, Any]]:
    """The figures in a file of one's own. Raises UsageError for what is no figure, and for one that is below
    LEAST_SHARE of the published figure of the same machine and fabric."""
    try:
        rows = read_yaml(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {path}.", hint="mlbench certify --help") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from None
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path} is not a list of figures.", hint="- {operation: all_reduce, bytes: ..., nodes: ...}")
    return [_check(path, number, row) for number, row in enumerate(rows, 1)]


def _check(path: Path, number: int, row: Any) -> dict[str, Any]:
    place = f"{path}, figure {number}"
    if not isinstance(row, dict) or (problem := _find_problem(row)) is not None:
        raise UsageError(f"{place}: {'it is not an object' if not isinstance(row, dict) else problem}.")
    found = {str(key): value for key, value in row.items()}
    for known in published():
        same = all(str(found.get(key, known[key])) == str(known[key]) for key in ("machine", "fabric"))
        is_named = "machine" in found or "fabric" in found
        if is_named and same and all(found[key] == known[key] for key in ("operation", "bytes", "nodes")):
            least = LEAST_SHARE * known["value"]
            if found["value"] < least:
                raise UsageError(
                    f"{place}: {found['value']:g} GB/s is below 75 % of the {known['value']:g} GB/s that "
                    f"{known['source']} publishes for {known['machine']} with {known['fabric']}: it would accept a "
                    "cluster that is broken.",
                    hint=f"Expect at least {least:g} GB/s.",
                )
    return found


def _find_problem(row: Mapping[Any, Any]) -> str | None:
    if missing := [name for name in _FIELDS if name not in row]:
        return f"{', '.join(missing)} is missing"
    if row["operation"] not in OPERATIONS:
        return f"operation must be one of {', '.join(OPERATIONS)}"
    for name in ("bytes", "nodes", "value"):
        if not is_finite_number(row[name]) or row[name] <= 0:
            return f"{name} must be a number above 0"
    return None


def parse_expected(text: str) -> list[dict[str, Any]]:
    """The figures in the parameter of a run; none if it has nothing sensible."""
    try:
        rows = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    if not isinstance(rows, list):
        return []
    return [
        {**row, "source": str(row["source"])[:200]}
        for row in rows
        if isinstance(row, dict) and _find_problem(row) is None
    ]
