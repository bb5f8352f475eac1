"""The interface for custom methods: one class in one file, which mlbench, ranks, self-check and predictions load.

Neither this module nor the top level of a method's file may import torch, because the command line loads both. A method
is found through the entry point `mlbench.methods` of an installed package, or by `--method-path FILE`; those of mlbench
are in `shipped`.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from task_images.comm.methods import MethodError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = "mlbench.methods"


class Invariant(Enum):
    """What the self-check requires of a method, besides agreement of the ranks."""

    exact_sum = "exact_sum"  # plain SGD with integer gradients gives their exact mean
    conserved = "conserved"  # received sum + the ranks' state "residual" = sum of what the ranks put in
    none = "none"


@dataclass(frozen=True)
class Option:
    """A numeric option of a method, set by --set comm.NAME=VALUE."""

    default: float
    low: float
    high: float
    help: str


class Round(NamedTuple):
    """A collective of an update: `kind` is allreduce or allgather, `size` the bytes that each rank contributes, `every`
    the number of updates between two of them."""

    kind: str
    size: float
    every: int = 1


class Run(Protocol):
    """One rank's training, as passed to the hooks of a method. Gradients and weights are flat tensors [d] of all
    parameters.

    options        the method's numbers
    state         tensors of this rank, saved in checkpoints
    weights       a copy of this rank's weights; assigned values are copied into the model
    gradients     a copy of this rank's gradients: those of its own batch until `reduce` assigns others
    """

    options: "dict[str, float]"
    state: "dict[str, Tensor]"
    weights: "Tensor"
    gradients: "Tensor"
    optimizer: "torch.optim.Optimizer"

    @property
    def update(self) -> int:
        """The number of this update, from 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def link(self) -> Any:
        """Collectives between the ranks (`comm.link.Link`), which count bytes."""

    def average(self, flat: "Tensor") -> "Tensor":
        """The mean of all ranks' `flat`."""

    def average_signs(self, flat: "Tensor") -> "tuple[Tensor, Tensor]":
        """Compress each rank's `flat` to signs times the mean magnitude per tensor. Returns the mean over ranks and
        this rank's compressed tensor."""

    def optimizer_state(self, key: str) -> "Tensor":
        """A copy of the optimizer's state `key` (e.g. exp_avg) of all parameters: [d], or one number per parameter."""

    def decayed_weights(self, rate: float) -> "Tensor":
        """All weights after decoupled weight decay like AdamW's: [d]."""


class RegisteredMethod:
    """Base class of custom methods. Subclasses set the attributes and override the hooks that they need.

    name, summary, source, formula   shown by `mlbench methods`; formula: bytes that a rank sends per step
    options       numeric options by name
    identical     all ranks have the same model after every update; otherwise each has its own in between
    late_options  options that delay something by a number of updates; the self-check sets them low to cover it
    optimizers    supported optimizers, by their names in torch.optim; empty: any. The self-check uses the first
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    formula: ClassVar[str]
    options: ClassVar[Mapping[str, Option]] = {}
    late_options: ClassVar[tuple[str, ...]] = ()
    identical: ClassVar[bool] = True
    optimizers: ClassVar[tuple[str, ...]] = ()
    invariant: ClassVar[Invariant] = Invariant.none
    reaches_goals: ClassVar[bool] = True
    note: ClassVar[str] = ""

    def start(self, run: Run) -> None:
        """Called once all ranks have the model. Creates the tensors of `run.state`, which are saved in checkpoints."""

    def reduce(self, run: Run) -> None:
        """Called when this rank's gradients are complete, to exchange them."""

    def step(self, run: Run, rate: float) -> bool:
        """Update the weights instead of the optimizer. Return False to let the optimizer make its step."""
        return False

    def exchange(self, run: Run, rate: float) -> None:
        """Called after the update, to exchange weights."""

    def rounds(self, count: int, options: Mapping[str, float]) -> Sequence[Round]:
        """The collectives of an update of `count` parameters of 4 bytes, for predictions."""
        raise NotImplementedError


REGISTERED: dict[str, RegisteredMethod] = {}


def parse_options(method: RegisteredMethod, given: Mapping[str, str]) -> str:
    """All options of a method, given ones and defaults, as the value of the axis. Raises MethodError."""
    values = {name: option.default for name, option in method.options.items()}
    for name, text in given.items():
        option = method.options[name]
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = float("nan")
        if not option.low <= values[name] <= option.high:
            raise MethodError(
                f"comm.{name} is {text!r}, not a number from {option.low:g} to {option.high:g}",
                f"--set comm.{name}={option.default:g}",
            )
    return ",".join(f"{name}={value:g}" for name, value in values.items()) or "none"


def read_options(text: str) -> dict[str, float]:
    """Options by name, from the value of the axis."""
    pairs = (part.partition("=") for part in text.split(",")) if text != "none" else ()
    return {name: float(value) for name, _, value in pairs}


def load_file(path: str) -> RegisteredMethod:
    """The method in a file: its one subclass of RegisteredMethod. Raises MethodError."""
    place = Path(path)
    spec = importlib.util.spec_from_file_location(f"mlbench_method_{place.stem}", place)
    if spec is None or spec.loader is None or not place.is_file():
        raise MethodError(f"{path} is not a Python file with a method", "--method-path FILE.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file may raise anything
        raise MethodError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, RegisteredMethod) and item.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise MethodError(f"{path} has {len(found)} subclasses of RegisteredMethod instead of one")
    return found[0]()


def load_installed(name: str = "") -> list[RegisteredMethod]:
    """The methods of installed packages: the one named `name`, or all. Raises MethodError."""
    found = []
    # Imported lazily: it takes longer than everything else here.
    for entry in importlib.import_module("importlib.metadata").entry_points(group=GROUP):
        if name in ("", entry.name):
            try:
                found.append(entry.load()())
            except Exception as error:  # the package may raise anything
                raise MethodError(f"the installed method {entry.name} cannot be loaded: {error}") from error
    return found
