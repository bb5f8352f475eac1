"""Published figures of clusters: what one may expect of the same machines, fabric, number of nodes and size.

They are not promises of a seller, and judge the cluster, never a node. `expectations.csv` has those that are shipped,
each with its source. A file of one's own has the same fields as JSON or YAML: a list of objects, of which machine,
fabric and date may be left out.
"""

import csv
import shlex
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.util.text import shorten
from mlbench_cli.util.yaml_text import read_yaml

LEAST_SHARE = 0.75  # of a published figure: a lower expectation would accept what is broken
ACCEPTED_SHARE = 0.90  # of an expected figure


class Figure(msgspec.Struct):
    """The bus bandwidth of a collective, in GB/s."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    bytes: Annotated[int, Meta(gt=0, lt=1 << 53)]
    nodes: Annotated[int, Meta(gt=0, lt=1 << 53)]
    value: Annotated[float, Meta(gt=0, lt=1e15)]
    source: Annotated[str, Meta(max_length=200)]
    machine: Annotated[str, Meta(max_length=200)] | None = None
    fabric: Annotated[str, Meta(max_length=200)] | None = None
    date: Any = None  # for people

    def is_of(self, other: "Figure") -> bool:
        """Whether both are of the same measurement on machines and fabrics that may be the same; one is named."""
        places = [(self.machine, other.machine), (self.fabric, other.fabric)]
        is_named = any(own is not None for own, _ in places)
        same = (self.operation, self.bytes, self.nodes) == (other.operation, other.bytes, other.nodes)
        return is_named and same and all(own in (None, known) for own, known in places)


_TEXT = "a text of at most 200 characters"
_ALLOWED = {
    "operation": "all_reduce, all_gather, reduce_scatter or all_to_all",
    "bytes": "a whole number above 0, e.g. 1073741824",
    "nodes": "a whole number above 0",
    "value": "the bus bandwidth in GB/s, above 0",
    "source": _TEXT,
    "machine": _TEXT,
    "fabric": _TEXT,
}


@cache
def published() -> tuple[Figure, ...]:
    """The shipped figures."""
    with open(Path(__file__).with_name("expectations.csv"), encoding="utf-8", newline="") as file:
        return msgspec.convert(tuple(csv.DictReader(file)), tuple[Figure, ...], strict=False)


def read_expectations(path: Path, cluster: str, nodes: int) -> list[Figure]:
    """The figures for so many nodes in a file of one's own. Raises UsageError for what is no figure, for one that is
    below LEAST_SHARE of the published figure of the same machine and fabric, and if there is none for so many nodes."""
    again = f"Correct it, then: mlbench certify {shlex.join([cluster, '--expect', str(path)])}"
    try:
        rows = read_yaml(path.read_text("utf-8"), str(path), dates_as_text=True)
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {path}.", hint="mlbench certify --help") from None
    except UsageError as error:
        raise UsageError(error.message, hint=again) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read: {reason}.", hint=again) from None
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path} has no list of figures.", hint=again)
    found = []
    for number, row in enumerate(rows, 1):
        if problem := _find_problem(row):
            raise UsageError(f"{path}, figure {number}: {problem}", hint=again)
        found.append(msgspec.convert(row, Figure))
    own = [figure for figure in found if figure.nodes == nodes]
    if not own:
        counts = " or ".join(map(str, sorted({figure.nodes for figure in found})))
        raise UsageError(
            f"{path} has figures for {counts} nodes, and {nodes} are to be measured.",
            hint=f"mlbench certify {shlex.join([cluster, '--expect', str(path), '--nodes', str(found[0].nodes)])}",
        )
    return own


def _find_problem(row: Any) -> str | None:
    """What is wrong with a figure, and what is allowed."""
    if not isinstance(row, dict):
        return f"{shorten(repr(row))} is no mapping of {', '.join(_ALLOWED)}."
    for name, kind in get_type_hints(Figure, include_extras=True).items():
        if name not in row and name in ("operation", "bytes", "nodes", "value", "source"):
            return f"{name} is missing. Allowed: {_ALLOWED[name]}."
        try:
            msgspec.convert(row.get(name), kind if name in row else Any)
        except msgspec.ValidationError:
            return f"{name} is {shorten(repr(row[name]))}. Allowed: {_ALLOWED[name]}."
    if unknown := [str(name) for name in row if name not in Figure.__struct_fields__]:
        near = did_you_mean(unknown[0], Figure.__struct_fields__)
        return f"there is no field {shorten(unknown[0])}.{near} Allowed: {', '.join(Figure.__struct_fields__)}."
    return find_too_low(msgspec.convert(row, Figure))


def find_too_low(figure: Figure) -> str | None:
    """What is wrong with a figure that is below LEAST_SHARE of a published one."""
    for known in published():
        if figure.is_of(known) and figure.value < LEAST_SHARE * known.value:
            return (
                f"value is {figure.value:g}. Allowed: at least {LEAST_SHARE * known.value:g} GB/s, "
                f"{100 * LEAST_SHARE:.0f} % of the {known.value:g} GB/s that {known.source} publishes for "
                f"{known.machine} with {known.fabric}. Less would accept a cluster that is broken."
            )
    return None


def parse_expected(text: str) -> list[Figure]:
    """The figures in the parameter of a run; none if it has nothing sensible."""
    try:
        found: list[Figure] = msgspec.json.decode(text, type=list[Figure]) if text else []
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return []
    return found
