"""What a task says of itself, declared once: its parameters (name, type, default, range, help), presets, goal, data.

A task has in its module `task`, or in its package, the class `Settings` with the parameters, whose defaults are the
preset `spec`, and `TASK`. `python -m task_images.describe` writes both to catalog.json, from which mlbench's catalog,
`--set` and the documentation read them. The classes below have shared parameters, to inherit from; assigning a value in
a subclass changes a parameter's default. `read_parameters` makes an instance from MLBENCH_PARAMETERS. No torch.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import get_annotations
from typing import Any, TypeVar

from task_images.contract import TaskUsageError

CUDNN = ("default", "deterministic", "benchmark")


@dataclass(frozen=True)
class ThroughputProtocol:
    """Untimed warm-up updates, number of blocks, updates per block. blocks = 0: no measurement."""

    warmup: int = 10
    blocks: int = 10
    updates: int = 10

    @property
    def is_on(self) -> bool:
        """Whether anything is measured."""
        return self.blocks > 0

    @property
    def total(self) -> int:
        """Total number of updates."""
        return self.warmup + self.blocks * self.updates


@dataclass(frozen=True)
class Task:
    """What the catalog says of a task besides its parameters.

    settings     class of the parameters; None: there are none
    number       in the specification of the benchmark
    data         where the data come from, one line
    backends, devices   that it supports
    goal         metric, comparison (">=" or "<="), wording with "{threshold}"; also parameters goal_full, goal_light
    method       own: its default method; refuses: reasons by method, or by `wraps`, `gates` (methods.base.Method).
                 None: no --method
    presets      what each changes of `spec`
    files        what the data folder must hold (mlbench_cli/tasks/datafiles.py)
    free         parameters that do not change the mathematics (results/archive/division.py)
    workers      sensible: largest number of ranks at which the goal is meaningful; reason
    absent       how long a run waits for missing nodes before it starts without them (run.absent), if ranks do not wait
                 for each other
    preflight    module whose `make_plan` refuses runs that cannot work (runs/preflight.py)
    packages     what pip installs in its image (task_images/Dockerfile)
    image        repository below the registry prefix, or a whole reference; empty: the task's name
    command      empty: python -m PACKAGE
    measured_on  hardware on which a figure of it was measured; notes: further lines; legacy_name: in MLBench 3
    """

    settings: type | None
    number: str
    title: str
    data: str
    backends: Sequence[str] = ("gloo", "nccl", "mpi")
    devices: Sequence[str] = ("cpu", "gpu")
    goal: Mapping[str, str] | None = None
    method: Mapping[str, Any] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, Any] | None = None
    free: Sequence[str] = ()
    workers: Mapping[str, Any] | None = None
    absent: str | None = None
    preflight: str | None = None
    packages: Sequence[str] = ()
    image: str = ""
    command: Sequence[str] = ()
    measured_on: Sequence[str] = ()
    notes: Sequence[str] = ()
    legacy_name: str | None = None


def parameter(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    choices: tuple[str, ...] = (),
    kind: str | None = None,
) -> Any:
    """A field of a Settings class. `min` and `max` apply to numbers, `choices` to strings and lists; `kind` is the type
    if it differs from the annotation ("sizes": a list of bytes)."""
    limits = {"min": min, "max": max, "choices": choices or None, "type": kind}
    metadata = {**{key: value for key, value in limits.items() if value is not None}, "help": help}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def describe(settings: type) -> dict[str, dict[str, Any]]:
    """The parameters of a Settings class by name: type, help, range and default. Its own come first, then those of its
    bases. A parameter redefined without `parameter` keeps the help and range of the base."""
    names = dict.fromkeys(name for one in settings.__mro__ for name in get_annotations(one))
    found = {one.name: one for one in fields(settings)}
    return {name: _describe_field(settings, found[name]) for name in names if name in found}


def _describe_field(settings: type, one: Field[Any]) -> dict[str, Any]:
    declared = (getattr(base, "__dataclass_fields__", {}).get(one.name) for base in settings.__mro__)
    metadata: Mapping[str, Any] = next((item.metadata for item in declared if item and item.metadata), {})
    default = one.default if one.default_factory is MISSING else one.default_factory()
    hint = typing.get_type_hints(settings)[one.name]  # annotations may be texts
    return {"type": getattr(hint, "__name__", str(hint)), **metadata, "default": default}


@dataclass(frozen=True)
class TrainingSettings:
    """Parameters of every training: how long to train, or whether to measure speed instead."""

    budget_seconds: float = parameter(
        0.0,
        "train for this many seconds, including validation, and report the metric (run.budget); 0: train to the goal",
        min=0,
        max=2592000,
    )
    report_every: int = parameter(25, "updates between reports of the training loss", min=1, max=1000000)
    blocks_after: int = parameter(10, "throughput: updates before the first block", min=0, max=1000000)
    blocks: int = parameter(0, "throughput: timed blocks, and no goal; 0: train to the goal", min=0, max=100000)
    block_updates: int = parameter(10, "throughput: updates of a block", min=1, max=1000000)

    @property
    def protocol(self) -> ThroughputProtocol:
        return ThroughputProtocol(self.blocks_after, self.blocks, self.block_updates)


@dataclass(frozen=True)
class CudaSettings:
    """Arithmetic on NVIDIA GPUs (precision.set_arithmetic); nothing changes on CPUs."""

    tf32: bool = parameter(False, "GPU: allow TF32 for fp32 products")
    cudnn: str = parameter(
        "default",
        "GPU: how cuDNN chooses algorithms; deterministic: bit-identical runs; benchmark: try all, use the fastest",
        choices=CUDNN,
    )


@dataclass(frozen=True)
class AccuracyOnSettings:
    """Which samples' accuracy is the goal."""

    goal_on: str = parameter(
        "validation",
        "samples on which the goal is measured; training: the augmented samples of the epoch, before the model "
        "learned from them",
        choices=("validation", "training"),
    )


@dataclass(frozen=True)
class HoldOutSettings:
    """Scoring on held-out training samples, so that nothing is tuned on the validation set."""

    hold_out: float = parameter(
        0.0,
        "share of training samples to score on instead of the validation set, so that nothing is tuned on "
        "it; 0: score on the validation set",
        min=0,
        max=0.5,
    )


@dataclass(frozen=True)
class SgdSettings:
    """SGD with momentum."""

    momentum: float = parameter(0.9, "momentum of SGD", min=0, max=1)
    nesterov: bool = parameter(True, "Nesterov momentum")
    weight_decay: float = parameter(0.0001, "weight decay on all parameters", min=0, max=1)


@dataclass(frozen=True)
class AccuracySettings:
    """Goals of a classification."""

    goal_full: float = parameter(80.0, "Prec@1 in percent at which the clock stops", min=0, max=100)
    goal_light: float = parameter(70.0, "the easier goal", min=0, max=100)


@dataclass(frozen=True)
class SpeedSettings:
    """Faster ways to compute the same (speed.py); all are listed in the result."""

    channels_last: bool = parameter(True, "memory format of images and convolutions; mathematically equal")
    compile: str = parameter(
        "no",
        "torch.compile, for each block of the model or for all of it; graphs: all of it, replayed as CUDA "
        "graphs on a GPU; compiling counts as training",
        choices=("no", "blocks", "whole", "graphs"),
    )
    precision: str = parameter(
        "fp32", "bf16, fp16: mixed, with parameters in fp32 (fp16 on GPUs only)", choices=("fp32", "bf16", "fp16")
    )
    loaders: int = parameter(2, "threads that load and augment ahead", min=0, max=256)


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints, from which any number of ranks can resume."""

    checkpoint_every: int = parameter(0, "updates between checkpoints; 0: none", min=0, max=1000000000)
    checkpoint_dir: str = parameter(
        "", "folder for checkpoints, of which all stay; empty: the output, in which the last one stays"
    )
    resume: str = parameter("", "checkpoint to resume from (a folder, .../UPDATE); every worker needs a copy")


@dataclass(frozen=True)
class ClassifierSettings(SgdSettings, AccuracySettings, AccuracyOnSettings, TrainingSettings, CudaSettings):
    """Parameters of every image classification."""

    batch_size: int = parameter(128, "images per rank and step", min=1, max=65536)
    epochs: int = parameter(164, "maximum number of epochs", min=1, max=100000)


@dataclass(frozen=True)
class LongClassifierSettings(SpeedSettings, ClassifierSettings, CheckpointSettings):
    """Parameters of long image classifications: checkpoints, and the options of speed."""


@dataclass(frozen=True)
class PlateauSettings:
    """Learning rates that decrease when the validation loss stops improving."""

    plateau_factor: float = parameter(0.5, "factor of the rate on a plateau of the validation loss", min=0, max=1)
    plateau_patience: int = parameter(1, "epochs without improvement before a plateau, minus one", min=0, max=100000)
    plateau_threshold: float = parameter(
        0.01, "minimum decrease of the validation loss that counts as an improvement", min=0, max=100
    )


Settings = TypeVar("Settings")


def read_parameters(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """An instance of the dataclass `kind` with the values `given`, else its defaults.

    Fields are int, float, str, bool or list. Raises TaskUsageError for an unknown key, a wrong type or a value that is
    not among the choices. mlbench checks ranges earlier; this check is for tasks started by hand.
    """
    hints, known = typing.get_type_hints(kind), describe(kind)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            names = ", ".join(item.name for item in dataclasses.fields(kind))  # type: ignore[arg-type]
            raise TaskUsageError(
                f'there is no parameter "{name}", only {names}',
                "After a change of Settings, run: python -m task_images.describe FOLDER",
            )
        wanted = typing.get_origin(hints[name]) or hints[name]
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise TaskUsageError(f'the parameter "{name}" is {value!r}, which is not of type {wanted.__name__}')
        choices = known[name].get("choices")
        if choices and not set(value if isinstance(value, list) else [value]) <= set(choices):
            raise TaskUsageError(f'the parameter "{name}" is {value!r}, not {" or ".join(choices)}')
        values[name] = value
    return kind(**values)
