"""Every method against its reference: what a cell of the matrix method x setting x ranks is, and how it is found.

Prescribed gradients of four tensors, whose scales differ by 1 000, in float64; 12 updates, the rate halved on the way.
`train` is one rank of a case, on any world; `judge` says what a case is: equal, documented or refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.door import read_options
from task_images.comm.methods import NATIVE, Method, MethodError, check, find_density
from task_images.comm.presets import PRESETS, resolve
from task_images.harness.distributed import World
from task_images.harness.errors import TaskUsageError
from task_images.harness.precision import LossScale
from tests.documentation import ROOT
from tests.unit.task_images.comm import references as papers
from tests.unit.task_images.comm.references import Array, Setting, Tensors
from tests.unit.task_images.comm.threads import run_ranks

SIZES = (2, 3, 4)
# Shape and scale of each parameter, in the order in which their gradients are ready and are sent.
TENSORS = (((24, 16), 1.0), ((16,), 1e-3), ((5, 4, 3), 3e-2), ((40, 12), 0.3))
RATES = (0.1,) * 6 + (0.05,) * 6
ADAM_RATES = tuple(rate / 5 for rate in RATES)
# Updates whose gradients overflow under a loss scale: rank, tensor, and whether all of it does.
OVERFLOWS = {5: (1, 0, False), 8: (0, 3, True)}
SETTINGS: dict[str, Setting] = {
    "momentum": Setting(momentum=0.9),
    "AdamW": Setting(decay=0.1, adam=True),
    "decay": Setting(momentum=0.9, decay=0.1),
    "clip": Setting(momentum=0.9, clip=2.0),
    "fp16": Setting(momentum=0.9),
}

Reference = papers.Synchronous | papers.Local | papers.PostLocal | papers.Servers | papers.OneBitAdam


class Cell(Enum):
    """What a case is. `documented`: equal to a reference that differs from the paper in a way that the page says."""

    equal = "equal"
    documented = "documented"
    refused = "refused"
    different = "DIFFERENT"


MEMORY = (
    "What a codec drops is stored in units of gradients. The paper stores it multiplied by the learning rate of its "
    "update, which differs when the rate changes. The paper has no momentum; here the optimizer is applied to the sum."
)
ALONE = "Each rank clips its own gradients and skips its own updates on overflow, without waiting for the others."
# How each implementation differs from its paper. ALONE holds for every method without a common update.
DIFFERENCES = {
    "ef-signsgd": MEMORY,
    "eftopk": MEMORY + " Entries are chosen per tensor, as in DGC and GRACE; `comm.scope=message` with "
    "`comm.plan=all` chooses them from the whole gradient, as in the paper.",
    "randomk": MEMORY,
    "gtopk": "Entries that a merge drops stay in the memory of the rank that merged. In the paper, each rank gets back "
    "those of its own entries that are not in the final choice; sums dropped by an inner merge are lost with more than "
    "two ranks. " + MEMORY,
    "fp16": "Equal within the rounding of the format, 0.1 %.",
    "bf16": "Equal within the rounding of the format, 1 %.",
    "signsgd-mv": "Ties are decided by a coin flip that is the same on all ranks; the paper does not define ties. The "
    "task's momentum is applied after the vote; Signum applies it before.",
    "async-ps": "Each worker sends 1/P of its change, so that one update of all workers is as large as a synchronous "
    "one. Each worker has its own optimizer.",
    "ssp-ps": "As async-ps; the staleness bound counts updates.",
    "powersgd": "The optimizer's momentum is applied to the sum. Vectors, and matrices that the rank would not make "
    "smaller than half, are sent uncompressed. `comm.warmup=STEPS` delays the start, as the authors' code does (100 or "
    "1 000 updates).",
    "onebit-adam": "Compressed momenta are all-gathered, so their mean does not need the second compression of the "
    "paper's server. The frozen variance keeps its last bias correction; the paper's Adam has none.",
    "choco": "The step size is twice the density, at most 0.5; densities below 5 % are rejected.",
}
EARLY = {"postlocalsgd": {"sync": "postlocal:4,3"}, "diloco": {"steps": "3"}, "onebit-adam": {"warmup_steps": "4"}}
UNCOMMON = ("slowmo", "diloco", "noop", "localsgd", "postlocalsgd", "dpsgd", "dpsgd-atc", "choco", "async-ps", "ssp-ps")


def list_methods() -> list[Method]:
    """Every preset, those with a late phase begun early enough for a case to meet it."""
    return [resolve(name, EARLY.get(name)) for name in PRESETS]


class Probe(nn.Module):
    """Parameters whose gradients can be chosen. They are declared backwards, since the last one's is ready first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(torch.from_numpy(weight.copy())) for weight in reversed(draw_weights())])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        """A loss with these gradients, given in the order of TENSORS."""
        return torch.stack(
            [layer(gradient) for layer, gradient in zip(self.layers, reversed(gradients), strict=True)]
        ).sum()


class Layer(nn.Module):
    """One parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, gradient: Tensor) -> Tensor:
        """Its sum, weighted with `gradient`."""
        return (self.weight * gradient).sum()


def draw_weights() -> Tensors:
    generator = np.random.default_rng(7)
    return [generator.normal(size=shape) for shape, _ in TENSORS]


def draw_gradients(update: int, size: int, overflows: bool) -> list[Tensors]:
    """All ranks' gradients of an update, from 1: a part that ranks share, and one that they do not."""
    found = []
    for rank in range(size):
        own, common = np.random.default_rng([update, rank]), np.random.default_rng([update, 1000])
        found.append([scale * (common.normal(size=shape) + own.normal(size=shape)) for shape, scale in TENSORS])
    if overflows and update in OVERFLOWS:
        rank, index, whole = OVERFLOWS[update]
        found[rank][index].flat[:: 1 if whole else 10**6] = np.inf
    return found


def list_rates(setting: Setting) -> Sequence[float]:
    return ADAM_RATES if setting.adam else RATES


def train(
    world: World, method: Method, name: str, make: Callable[[Method], Strategy] = make_strategy
) -> tuple[Tensors, list[bool]]:
    """This rank's weights at the end in the order of TENSORS, before any consensus, and which updates it made."""
    setting = SETTINGS[name]
    scale = LossScale(2.0**10, window=3) if name == "fp16" else None
    strategy, model = make(method), Probe()

    def make_optimizer(probe: nn.Module) -> torch.optim.Optimizer:
        if setting.adam:
            return torch.optim.AdamW(
                probe.parameters(), betas=setting.betas, eps=setting.eps, weight_decay=setting.decay
            )
        return torch.optim.SGD(probe.parameters(), 1.0, setting.momentum, weight_decay=setting.decay)

    module = strategy.attach(world, model, make_optimizer)
    made = []
    for update, rate in enumerate(list_rates(setting), 1):
        strategy.begin(1.0, float(world.size), scale=scale)
        gradients = draw_gradients(update, world.size, name == "fp16")[world.rank]
        factor = 1.0 if scale is None else scale.value
        with strategy.last_pass():
            module([torch.from_numpy(part * factor) for part in gradients]).backward()
        in_turn = method.staleness != "sync"
        for turn in range(world.size if in_turn else 1):
            if not in_turn or turn == world.rank:
                made.append(strategy.step(rate, setting.clip))
            if in_turn:
                world.barrier()
    if method.barrier == "none":
        with strategy.consensus():
            pass
    found = [_whole(parameter) for parameter in reversed(list(model.parameters()))]
    strategy.close()
    return found, made


def _whole(parameter: Tensor) -> Array:
    value = parameter.detach()
    return np.asarray((value.full_tensor() if hasattr(value, "full_tensor") else value).numpy()).copy()


class TorchRandom:
    """The choices that a run with seed 0 makes, all parameters being in message 0."""

    def coins(self, update: int, count: int) -> NDArray[np.bool_]:
        generator = torch.Generator().manual_seed(update * 100_003)
        return torch.randint(2, (count,), generator=generator, dtype=torch.uint8).numpy() > 0

    def places(self, update: int, sizes: Sequence[int], density: float) -> list[NDArray[np.int64]]:
        generator = torch.Generator().manual_seed(update * 100_003)
        return [torch.randperm(size, generator=generator)[: max(1, int(density * size))].numpy() for size in sizes]

    def rounding(self, update: int, rank: int, count: int) -> Array:
        generator = torch.Generator().manual_seed(update * 100_003 * 65_537 + rank)
        return torch.rand(count, generator=generator).double().numpy()

    def factor(self, name: int, columns: int, rank: int) -> Array:
        start = sum(int(np.prod(shape)) for shape, _ in TENSORS[:name])
        generator = torch.Generator().manual_seed(start * 31)
        return torch.randn(columns, rank, generator=generator).double().numpy()


def round_to_bf16(values: Array) -> Array:
    return torch.from_numpy(values).to(torch.bfloat16).double().numpy()


def make_reference(method: Method, setting: Setting, size: int) -> Reference:
    """What the paper of a method says."""
    random, (word, _, argument) = TorchRandom(), method.codec.partition(":")
    if method.engine == "registered":
        options = read_options(method.options)
        if method.name == "slowmo":
            return papers.Local(papers.SlowMo(int(options["steps"]), options["beta"], options["alpha"], draw_weights()))
        if method.name == "onebit-adam":
            return papers.OneBitAdam(int(options["warmup_steps"]))
        rate, factor = options["outer_rate"], options["outer_momentum"]
        return papers.Local(papers.DiLoCo(int(options["steps"]), rate, factor, draw_weights()))
    if method.staleness != "sync":
        return papers.Servers()
    if method.transport == "noop":
        return papers.Local(lambda update, weights, rate: None)
    if method.sync.startswith("postlocal:"):
        start, every = method.sync.partition(":")[2].split(",")
        return papers.PostLocal(int(start), int(every))
    if method.sync.startswith("local:"):
        return papers.Local(papers.average(int(method.sync.partition(":")[2])))
    if method.transport == "gossip" and word == "topk":
        believed = [draw_weights() for _ in range(size)]
        density = float(argument)
        return papers.Local(papers.ChocoGossip(density, min(0.5, 2 * density), believed))
    if method.transport == "gossip":
        return papers.Local(papers.mix, before=method.order != "deferred")
    combine: dict[str, Callable[[], papers.Combine]] = {
        "none": lambda: papers.mean,
        "fp16": lambda: papers.Rounded(lambda part: part.astype(np.float16).astype(np.float64)),
        "bf16": lambda: papers.Rounded(round_to_bf16),
        "sign": lambda: (
            papers.ErrorFeedback(papers.scaled_sign) if method.feedback == "ef" else papers.MajorityVote(random)
        ),
        "topk": lambda: papers.ErrorFeedback(papers.sparse(float(argument)), keep=method.feedback == "ef"),
        "randomk": lambda: papers.ErrorFeedback(papers.random_places(float(argument), random)),
        "qsgd": lambda: papers.ErrorFeedback(papers.quantized(int(argument), random), keep=False),
        "powersgd": lambda: papers.PowerSgd(int(argument), random, method.warmup_updates),
    }
    if method.transport == "gtopk":
        return papers.Synchronous(papers.GlobalTopK(float(argument)))
    if method.momentum != "none":
        falling = partial(find_density, float(argument), method.warmup_updates)
        return papers.Synchronous(
            papers.DeepGradientCompression(falling, float(method.momentum), setting.clip), clips=False
        )
    return papers.Synchronous(combine[word]())


def describe(cells: Mapping[int, str]) -> str:
    """The text of a cell of the page, of what a case is by number of ranks."""
    sizes: dict[str, list[str]] = {}
    for size, cell in cells.items():
        sizes.setdefault(cell, []).append(str(size))
    return ", ".join(f"{cell} ({', '.join(found)})" for cell, found in sizes.items())


def read_page() -> dict[str, dict[str, str]]:
    """The cells of the committed page by method and setting."""
    text = (ROOT / "docs" / "explanation" / "methods-equality.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: dict(zip(SETTINGS, (cell.strip() for cell in row.split("|")), strict=True)) for name, row in rows}


def find_error(found: Sequence[Tensors], expected: Sequence[Tensors]) -> float:
    """The greatest difference of any rank's tensor, relative to how far training has moved it."""
    start = draw_weights()
    return max(
        float(np.abs(one - other).max() / max(np.abs(other - first).max(), 1e-12))
        for own, wanted in zip(found, expected, strict=True)
        for one, other, first in zip(own, wanted, start, strict=True)
    )


def expect(method: Method, name: str, size: int) -> list[Tensors]:
    """The weights of every rank by the reference."""
    setting = SETTINGS[name]
    if method.momentum != "none":
        # Momentum is the method's; the task's is taken away.
        setting = replace(setting, momentum=0.0)
    reference = make_reference(method, setting, size)
    gradients = partial(draw_gradients, size=size, overflows=name == "fp16")
    return reference.run(setting, draw_weights(), gradients, list_rates(setting))


def find_tolerance(method: Method) -> float:
    """Half precision rounds; scales and norms travel in float32."""
    return {"fp16": 2e-3, "bf16": 2e-2}.get(method.codec, 1e-5)


@dataclass(frozen=True)
class Verdict:
    """What a case is, and the reason of a refusal, or by how much it differs."""

    cell: Cell
    why: str = ""


def name_cell(method: Method, name: str, error: float) -> Verdict:
    """What a case with this error is."""
    if not error <= find_tolerance(method):
        return Verdict(Cell.different, f"{error:.2g}")
    alone = method.name in UNCOMMON and name in ("clip", "fp16")
    return Verdict(Cell.documented if alone or method.name in DIFFERENCES else Cell.equal)


def judge(method: Method, name: str, size: int) -> Verdict:
    """What a case is, for methods that threads can run: all but torch's own engines."""
    assert method.engine not in NATIVE
    try:
        check(method, size)
        found = run_ranks(size, lambda world: train(world, method, name), method)
    except (MethodError, TaskUsageError, ValueError) as error:
        return Verdict(Cell.refused, str(error))
    return name_cell(method, name, find_error([weights for weights, _ in found], expect(method, name, size)))
