"""Colors and marks with the same meaning everywhere: the color is a method's family, the mark the member.

The light and dark values of the colors are defined in figures.css.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from mlbench_cli.model.methods import OWN

STYLE = Path(__file__).with_name("figures.css")
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "step": ("bsp", "single", "noop"),
    "overlap": ("wfbp", "mgwfbp", "fusion", "optfusion", "bytescheduler", "dear"),
    "sparse": ("eftopk", "topk", "dgc", "gtopk", "randomk"),
    "small": ("powersgd", "fp16", "bf16", "qsgd", "signsgd-mv", "ef-signsgd"),
    "servers": ("bsp-ps", "wfbp-ps", "bytescheduler-ps", "async-ps", "ssp-ps"),
    "local": ("localsgd", "postlocalsgd", "dpsgd", "choco"),
    "engine": ("ddp", "ddp-static", "zero1", "fsdp2", "hsdp"),
}
_METHODS = {name: (family, place) for family, names in FAMILIES.items() for place, name in enumerate(names)}
_METHODS[OWN] = _METHODS["bsp"]
# The parts of a step in the order of stacked bars: label, color, and the task contract's categories.
PHASES = (
    ("computing", "compute", ("forward", "loss", "backward", "optimizer")),
    ("waiting for messages", "communication", ("communication",)),
    ("data", "data", ("data_wait", "preprocessing")),
    ("validation and metrics", "evaluation", ("validation", "metrics")),
    ("other", "other", ("other",)),
)
# Circle, square, diamond, triangle, inverted triangle, plus: corners in units of a mark's half width.
MARKS: tuple[tuple[tuple[float, float], ...], ...] = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    ((0, -1.1), (1.1, 0.9), (-1.1, 0.9)),
    ((0, 1.1), (1.1, -0.9), (-1.1, -0.9)),
    (
        *((-1.1, -0.4), (-0.4, -0.4), (-0.4, -1.1), (0.4, -1.1), (0.4, -0.4), (1.1, -0.4)),
        *((1.1, 0.4), (0.4, 0.4), (0.4, 1.1), (-0.4, 1.1), (-0.4, 0.4), (-1.1, 0.4)),
    ),
)

Look = tuple[str, int]  # a color's name and the number of a mark


def look_of(index: int) -> Look:
    """The look of series `index` if methods do not distinguish them; there are 42."""
    return tuple(FAMILIES)[index % len(FAMILIES)], index % len(MARKS)


def choose_looks(methods: Sequence[str]) -> list[Look]:
    """The looks of series with these methods: by method if all differ, else by index."""
    known = [_METHODS.get(phrase if phrase == OWN else phrase.partition(" ")[0]) for phrase in methods]
    found = [look for look in known if look is not None]
    if len(found) == len(methods) == len(set(found)):
        return found
    return [look_of(index) for index in range(len(methods))]


def color_of_phase(name: str) -> str:
    """The color of a phase such as "backward"; unknown phases have the color of "other"."""
    return next((color for _, color, names in PHASES if name in (*names, color)), "other")


@cache
def read_colors() -> dict[str, str]:
    """The light colors by name, for pictures on white."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", STYLE.read_text("utf-8").split("@media", 1)[0]))
