"""Published figures of clusters: what one may expect of the same machines, fabric, number of nodes and size.

They are not promises of a seller, and judge the cluster, never a node. `expectations.csv` has those that are shipped,
each with its source. A file of one's own has the same fields as JSON or YAML: a list of objects, of which machine,
fabric and date may be left out.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.util.yaml_text import read_yaml

LEAST_SHARE = 0.75  # of a published figure: a lower expectation would accept what is broken
ACCEPTED_SHARE = 0.90  # of an expected figure


class Figure(msgspec.Struct):
    """The bus bandwidth of a collective, in GB/s."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    bytes: Annotated[int, Meta(gt=0)]
    nodes: Annotated[int, Meta(gt=0)]
    value: Annotated[float, Meta(gt=0, lt=1e15)]
    source: Annotated[str, Meta(max_length=200)]
    machine: str | None = None
    fabric: str | None = None

    def is_of(self, other: "Figure") -> bool:
        """Whether both are of the same measurement on machines and fabrics that may be the same; one is named."""
        places = [(self.machine, other.machine), (self.fabric, other.fabric)]
        is_named = any(own is not None for own, _ in places)
        same = (self.operation, self.bytes, self.nodes) == (other.operation, other.bytes, other.nodes)
        return is_named and same and all(own in (None, known) for own, known in places)


@cache
def published() -> tuple[Figure, ...]:
    """The shipped figures."""
    with open(Path(__file__).with_name("expectations.csv"), encoding="utf-8", newline="") as file:
        return msgspec.convert(tuple(csv.DictReader(file)), tuple[Figure, ...], strict=False)


def read_expectations(path: Path) -> list[Figure]:
    """The figures in a file of one's own. Raises UsageError for what is no figure, and for one that is below
    LEAST_SHARE of the published figure of the same machine and fabric."""
    try:
        found: list[Figure] = msgspec.convert(
            read_yaml(path.read_text("utf-8")), Annotated[list[Figure], Meta(min_length=1)]
        )
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {path}.", hint="mlbench certify --help") from None
    except msgspec.ValidationError as error:
        hint = f"Each figure has: {', '.join(Figure.__struct_fields__[:5])}. Operations: all_reduce, all_gather, ..."
        raise UsageError(f"{path} is not a list of figures: {error}.", hint=hint) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", hint=f"file {path}") from None
    for number, figure in enumerate(found, 1):
        for known in published():
            if figure.is_of(known) and figure.value < LEAST_SHARE * known.value:
                raise UsageError(
                    f"{path}, figure {number}: {figure.value:g} GB/s is below {100 * LEAST_SHARE:.0f} % of the "
                    f"{known.value:g} GB/s that {known.source} publishes for {known.machine} with {known.fabric}: it "
                    "would accept a cluster that is broken.",
                    hint=f"Expect at least {LEAST_SHARE * known.value:g} GB/s.",
                )
    return found


def parse_expected(text: str) -> list[Figure]:
    """The figures in the parameter of a run; none if it has nothing sensible."""
    try:
        found: list[Figure] = msgspec.json.decode(text, type=list[Figure]) if text else []
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return []
    return found
