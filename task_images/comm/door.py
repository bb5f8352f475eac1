"""The door for methods: one class in one file, which the tool, the ranks, the self-check and predictions read.

No torch here, nor at the top of a method's file: the tool reads it, too. A method comes in by the entry point
`mlbench.methods` of an installed package, or by `--method-path FILE`; mlbench's own are in `shipped`.
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
    """What the self-check holds a method to, besides agreement of the ranks."""

    exact_sum = "exact_sum"  # plain SGD with integer gradients gives their exact mean
    conserved = "conserved"  # what arrived, plus the ranks' state "residual", is what the ranks put in
    none = "none"


@dataclass(frozen=True)
class Option:
    """A number of a method, set by --set comm.NAME=VALUE."""

    default: float
    low: float
    high: float
    help: str


class Round(NamedTuple):
    """A collective of an update: `kind` is allreduce or allgather, `size` the bytes that each rank hands over, and
    `every` says that it comes once in so many updates."""

    kind: str
    size: float
    every: int = 1


class Run(Protocol):
    """One rank's training, as the hooks of a method see it. Gradients and weights are flat tensors [d] of all
    parameters.

    options        the method's numbers
    state          tensors of this rank, which checkpoints have
    weights        all weights of this rank, a copy; what is set is copied into the model
    gradients      all gradients of this rank, a copy: of its own batch, until `reduce` has set others
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
        """How many ranks there are."""

    @property
    def link(self) -> Any:
        """All collectives between the ranks (`comm.link.Link`), whose bytes are counted."""

    def average(self, flat: "Tensor") -> "Tensor":
        """The mean of all ranks' `flat`."""

    def average_signs(self, flat: "Tensor") -> "tuple[Tensor, Tensor]":
        """The mean of what all ranks send of their `flat`, signs times the mean magnitude of each tensor, and what this
        rank sends of it."""

    def optimizer_state(self, key: str) -> "Tensor":
        """What the optimizer keeps under `key` (exp_avg, say) for all parameters, a copy: [d], or one number each."""

    def decayed_weights(self, rate: float) -> "Tensor":
        """All weights, after decoupled weight decay as by AdamW: [d]."""


class RegisteredMethod:
    """A method. Subclasses set the attributes and override the hooks that they need.

    name, summary, source, formula   as `mlbench methods` shows them; formula: bytes that a rank sends in a step
    options       its numbers, by name
    identical     all ranks have the same model after every update; otherwise each has its own in between
    late_options  those that count updates until something happens; the self-check takes small ones to meet it
    optimizers    names in torch.optim that the task may have; empty: any. The self-check uses the first one
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
        """The model is on all ranks: make the tensors of `run.state`, which checkpoints have."""

    def reduce(self, run: Run) -> None:
        """This rank's gradients are complete: exchange them, if the method does that."""

    def step(self, run: Run, rate: float) -> bool:
        """Update the weights in place of the optimizer; False: the optimizer makes its step."""
        return False

    def exchange(self, run: Run, rate: float) -> None:
        """The update is made: exchange weights, if the method does that."""

    def rounds(self, count: int, options: Mapping[str, float]) -> Sequence[Round]:
        """The collectives of an update of `count` parameters of 4 bytes, for predictions."""
        raise NotImplementedError


REGISTERED: dict[str, RegisteredMethod] = {}


def parse_options(method: RegisteredMethod, given: Mapping[str, str]) -> str:
    """All options of a method, those that are given and the defaults, as the axis has them. Raises MethodError."""
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
    """Options by name, from the axis."""
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
    except Exception as error:  # whatever the file does
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
    """The methods of installed packages: of that name, or all. Raises MethodError."""
    found = []
    # Loaded when it is needed: it takes longer than everything else here.
    for entry in importlib.import_module("importlib.metadata").entry_points(group=GROUP):
        if name in ("", entry.name):
            try:
                found.append(entry.load()())
            except Exception as error:  # whatever the package does
                raise MethodError(f"the method {entry.name} of an installed package fails: {error}") from error
    return found
