"""A program for test_equality.py: every method against its paper, in every setting, on the ranks of one start.

Prescribed gradients of four tensors, whose scales differ by 1 000, in float64; 12 updates, the rate halved on the way.
A cell of the table is a method and a setting, an optimizer in a situation: *clip* has ranks of unequal weight, too;
*overflow* has a loss scale that grows, and two updates that overflow, one in a single entry and one in a whole tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from task_images.contract import Contract
from task_images.methods import FILES
from task_images.methods.base import LossScale, Method
from task_images.methods.catalog import find_class
from task_images.run import run
from task_images.world import World, open_world
from tests.contract.task_images.methods import references as papers
from tests.contract.task_images.methods.references import Array, Setting, Tensors

# Shape and scale of each parameter, in the order in which their gradients are ready and are sent.
TENSORS = (((24, 16), 1.0), ((16,), 1e-3), ((5, 4, 3), 3e-2), ((40, 12), 0.3))
RATES = (0.1,) * 6 + (0.05,) * 6
# Updates whose gradients overflow under a loss scale: rank, tensor, and whether all of it does.
OVERFLOWS = {5: (1, 0, False), 8: (0, 3, True)}
WEIGHTS = (3.0, 1.0, 2.0, 5.0)
CLIP = 2.0
OPTIMIZERS = {"SGD": Setting(), "momentum": Setting(momentum=0.9), "AdamW": Setting(decay=0.1, adam=True)}
SITUATIONS = ("plain", "clip", "overflow")
SETTINGS = [f"{optimizer}, {situation}" for optimizer in OPTIMIZERS for situation in SITUATIONS]
# Late phases begin early enough for a case to meet them, and a factor is not 1.
EARLY = {
    "diloco": {"steps": "3"},
    "onebit-adam": {"warmup_steps": "4"},
    "powersgd": {"warmup": "2"},
    "slowmo": {"alpha": "0.5"},
}
EQUAL, REFUSED = "equal", "refused"
TOLERANCE = 1e-5  # scales and norms travel in float32
# Of formats that round, by the norm of a tensor: AdamW makes a full step of a gradient that rounding turns around.
ROUNDED = {"fp16": 0.02, "bf16": 0.05}

Reference = papers.Synchronous | papers.Local | papers.OneBitAdam


@dataclass(frozen=True)
class Case:
    """A setting with a number of ranks."""

    setting: str
    size: int

    @property
    def situation(self) -> str:
        return self.setting.partition(", ")[2]

    @property
    def update(self) -> Setting:
        own = OPTIMIZERS[self.setting.partition(", ")[0]]
        return replace(own, clip=CLIP) if self.situation == "clip" else own

    @property
    def weights(self) -> Sequence[float]:
        return WEIGHTS[: self.size] if self.situation == "clip" else (1.0,) * self.size

    @property
    def rates(self) -> Sequence[float]:
        return [rate / 5 for rate in RATES] if self.update.adam else RATES

    def gradients(self, update: int) -> list[Tensors]:
        """All ranks' gradients of an update, from 1: a part that ranks share, and one that they do not."""
        found = []
        for rank in range(self.size):
            own, common = np.random.default_rng([update, rank]), np.random.default_rng([update, 1000])
            found.append([scale * (common.normal(size=shape) + own.normal(size=shape)) for shape, scale in TENSORS])
        if self.situation == "overflow" and update in OVERFLOWS:
            rank, index, whole = OVERFLOWS[update]
            found[rank][index].flat[:: 1 if whole else 10**6] = np.inf
        return found

    def weighted(self, update: int) -> list[Tensors]:
        """The gradients such that their plain mean is the weighted one."""
        factors = [self.size * weight / sum(self.weights) for weight in self.weights]
        return [[factor * part for part in own] for factor, own in zip(factors, self.gradients(update), strict=True)]


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


def make(name: str) -> Method:
    return find_class(name)(**EARLY.get(name, {}))


def is_refused(method: Method, case: Case) -> bool:
    """What the command line or the method itself refuses."""
    needs_norm = case.situation != "plain"
    is_unfit = bool(method.optimizers) and ("AdamW" if case.update.adam else "SGD") not in method.optimizers
    return is_unfit or (method.gates and needs_norm) or (method.name == "hsdp" and case.size != 4)


def train(world: World, method: Method, case: Case) -> tuple[Tensors, list[bool]]:
    """This rank's weights at the end in the order of TENSORS, before any consensus, and which updates it made."""
    setting, model = case.update, Probe()
    scale = LossScale(2.0**10, window=3) if case.situation == "overflow" else None

    def make_optimizer(probe: nn.Module) -> torch.optim.Optimizer:
        if setting.adam:
            return torch.optim.AdamW(
                probe.parameters(), betas=setting.betas, eps=setting.eps, weight_decay=setting.decay
            )
        return torch.optim.SGD(probe.parameters(), 1.0, setting.momentum, weight_decay=setting.decay)

    module = method.attach(world, model, make_optimizer)
    made = []
    for update, rate in enumerate(case.rates, 1):
        method.begin(case.weights[world.rank], sum(case.weights), scale=scale)
        gradients = case.gradients(update)[world.rank]
        factor = 1.0 if scale is None else scale.value
        module([torch.from_numpy(part * factor) for part in gradients]).backward()
        made.append(method.step(rate, setting.clip))
    if method.gates:
        with method.consensus():
            pass
    found = [_whole(parameter) for parameter in reversed(list(model.parameters()))]
    method.close()
    return found, made


def _whole(parameter: Tensor) -> Array:
    value = parameter.detach()
    return np.asarray((value.full_tensor() if hasattr(value, "full_tensor") else value).numpy()).copy()


class TorchRandom:
    """The choices that a run with seed 0 makes, all parameters being in message 0."""

    def coins(self, update: int, count: int) -> NDArray[np.bool_]:
        generator = torch.Generator().manual_seed(update * 100_003)
        return torch.randint(2, (count,), generator=generator, dtype=torch.uint8).numpy() > 0

    def rounding(self, update: int, rank: int, count: int) -> Array:
        generator = torch.Generator().manual_seed(update * 100_003 * 65_537 + rank)
        return torch.rand(count, generator=generator).double().numpy()

    def factor(self, name: int, columns: int, rank: int) -> Array:
        start = sum(int(np.prod(shape)) for shape, _ in TENSORS[:name])
        generator = torch.Generator().manual_seed(start * 31)
        return torch.randn(columns, rank, generator=generator).double().numpy()


def round_to_bf16(values: Array) -> Array:
    return torch.from_numpy(values).to(torch.bfloat16).double().numpy()


def make_reference(method: Method, size: int) -> Reference:
    """What the paper of a method says."""
    random, options = TorchRandom(), method.values
    local: Mapping[str, papers.Exchange] = {
        "noop": lambda update, weights, rate: None,
        "localsgd": papers.average(options.get("steps", 1)),
        "dpsgd": papers.mix,
    }
    combine: Mapping[str, papers.Combine] = {
        "fp16": papers.Rounded(lambda part: part.astype(np.float16).astype(np.float64)),
        "bf16": papers.Rounded(round_to_bf16),
        "ef-signsgd": papers.ErrorFeedback(papers.scaled_sign),
        "signsgd-mv": papers.MajorityVote(random),
        "eftopk": papers.ErrorFeedback(papers.sparse(options.get("density", 1.0))),
        "topk": papers.ErrorFeedback(papers.sparse(options.get("density", 1.0)), keep=False),
        "dgc": papers.DeepGradientCompression(options.get("density", 1.0), options.get("momentum", 0.0)),
        "gtopk": papers.GlobalTopK(options.get("density", 1.0)),
        "qsgd": papers.ErrorFeedback(papers.quantized(options.get("levels", 1), random), keep=False),
        "powersgd": papers.PowerSgd(options.get("rank", 1), random, options.get("warmup", 0)),
    }
    if method.name in local:
        return papers.Local(local[method.name], before=method.name == "dpsgd")
    if method.name in combine:
        return papers.Synchronous(combine[method.name])
    if method.name == "slowmo":
        return papers.Local(papers.SlowMo(options["steps"], options["beta"], options["alpha"], draw_weights()))
    if method.name == "diloco":
        rate, factor = options["outer_rate"], options["outer_momentum"]
        return papers.Local(papers.DiLoCo(options["steps"], rate, factor, draw_weights()))
    if method.name == "choco":
        density = options["density"]
        believed = [draw_weights() for _ in range(size)]
        return papers.Local(papers.ChocoGossip(density, min(0.5, 2 * density), believed))
    if method.name == "onebit-adam":
        return papers.OneBitAdam(options["warmup_steps"])
    return papers.Synchronous(papers.mean)


def find_error(found: Tensors, expected: Tensors, norm: int | None = None) -> float:
    """The greatest difference of a tensor, relative to how far training has moved it; by the greatest entry, or by a
    norm."""

    def size(part: Array) -> float:
        return float(np.linalg.norm(part.ravel(), np.inf if norm is None else norm))

    return max(
        size(one - other) / max(size(other - first), 1e-12)
        for one, other, first in zip(found, expected, draw_weights(), strict=True)
    )


def judge(world: World, name: str, case: Case) -> str:
    """A cell: what a method is in a case."""
    method = make(name)
    if is_refused(method, case):
        return REFUSED
    found, made = train(world, method, case)
    # The momentum of dgc is the method's.
    setting = replace(case.update, momentum=0.0) if name == "dgc" else case.update
    expected = make_reference(method, case.size).run(setting, draw_weights(), case.weighted, case.rates)
    error = world.max([find_error(found, expected[world.rank], 2 if name in ROUNDED else None)])[0]
    if not error <= ROUNDED.get(name, TOLERANCE):
        return f"DIFFERENT by {error:.2g}"
    skipped = [update for update, done in enumerate(made, 1) if not done]
    if case.situation == "overflow" and method.identical and skipped != list(OVERFLOWS):
        return f"SKIPPED {skipped}"
    return EQUAL


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    for name in FILES:
        for setting in contract.parameters["settings"]:
            print("CELL", name, judge(world, name, Case(setting, world.size)), setting, sep="|", flush=True)
    world.close()


if __name__ == "__main__":
    run(main)
