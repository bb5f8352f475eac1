"""Colors and marks with the same meaning everywhere: the color is a method's family, the mark the member.

The light and dark values of the colors are defined in figures.css.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from mlbench_cli.model.methods import OWN
from task_images.contract import MIXED_CATEGORIES

STYLE = Path(__file__).with_name("figures.css")
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "step": ("bsp", "single", "noop"),
    "overlap": ("wfbp", "mgwfbp", "fusion", "optfusion", "bytescheduler", "dear"),
    "sparse": ("eftopk", "topk", "dgc", "gtopk"),
    "small": ("powersgd", "fp16", "bf16", "qsgd", "signsgd-mv", "ef-signsgd"),
    "servers": ("bsp-ps", "wfbp-ps", "bytescheduler-ps"),
    "local": ("localsgd", "dpsgd", "choco"),
    "engine": ("ddp", "zero1", "fsdp2", "hsdp"),
}
FAMILY_NAMES: Mapping[str, str] = {
    "step": "after the backward pass",
    "overlap": "during the backward pass",
    "sparse": "only the largest numbers",
    "small": "fewer bits, lower rank",
    "servers": "parameter servers",
    "local": "local steps, neighbors",
    "engine": "engines of torch",
}
_METHODS = {name: (family, place) for family, names in FAMILIES.items() for place, name in enumerate(names)}
_METHODS[OWN] = _METHODS["bsp"]
# The parts of a step in the order of stacked bars: label, color, and the task contract's categories.
PHASES = (
    ("computing", "compute", ("forward", "loss", "backward", "optimizer")),
    ("computing with messages in it", "mixed", tuple(MIXED_CATEGORIES.values())),
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

MAX_LOOKS = len(FAMILIES) * len(MARKS)

Look = tuple[str, int]  # a color's name and the number of a mark


def look_of(index: int) -> Look:
    """The look of series `index` if methods do not distinguish them; there are MAX_LOOKS."""
    return tuple(FAMILIES)[index % len(FAMILIES)], index % len(MARKS)


def choose_looks(methods: Sequence[str]) -> list[Look]:
    """The looks of series with these methods: by method if all differ, else by index."""
    found = [look for phrase in methods if (look := _look_of_method(phrase)) is not None]
    if len(found) == len(methods) == len(set(found)):
        return found
    return [look_of(index) for index in range(len(methods))]


def choose_shared_looks(names: Sequence[str], methods: Sequence[str]) -> list[Look]:
    """The looks of series, equal for equal names; by method if each name has one that no other has."""
    found: dict[str, str] = {}
    for name, method in zip(names, methods, strict=True):
        found[name] = method if found.get(name, method) == method else ""
    looks = dict(zip(found, choose_looks([*found.values()]), strict=True))
    return [looks[name] for name in names]


def family_of(method: str) -> str:
    """The family of a method in words: "during the backward pass"; empty if unknown."""
    look = _look_of_method(method)
    return FAMILY_NAMES[look[0]] if look else ""


def _look_of_method(phrase: str) -> Look | None:
    return _METHODS.get(phrase if phrase == OWN else phrase.partition(" ")[0])


def color_of_phase(name: str) -> str:
    """The color of a phase such as "backward"; unknown phases have the color of "other"."""
    return next((color for _, color, names in PHASES if name in (*names, color)), "other")


@cache
def read_colors() -> dict[str, str]:
    """The light colors by name, for pictures on white."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", STYLE.read_text("utf-8").split("@media", 1)[0]))
