"""A training in JAX: model, gradients, all-reduce and optimizer are JAX's. Initial values, data, schedule, goal and
reports are those of the same training in torch, so that both have the same curve but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from task_images.harness.array_checkpoint import load_arrays, save_arrays
from task_images.harness.errors import TaskUsageError
from task_images.harness.frameworks import open_framework
from task_images.harness.jax_ranks import JaxRanks
from task_images.harness.loop import Loop, Values
from task_images.harness.losses import make_divergence_error
from task_images.harness.ranks import compare_checksums
from task_images.harness.training import NOT_FINITE, Trainer
from task_images.harness.updates import Update

P = TypeVar("P")
Arrays = dict[str, Any]  # of JAX, by the names of the torch module's parameters or buffers


class JaxProgram(NamedTuple):
    """What JAX computes of a model, as pure functions of its arrays.

    evaluate  (parameters, buffers, *inputs) -> outputs
    train     (parameters, buffers, *inputs) -> (loss, (outputs, buffers)); the loss is what is differentiated
    unpack    a prepared pass -> (its tensors, what the loss is divided by for the report, weight in that mean)
    """

    evaluate: Callable[..., Any]
    train: Callable[..., Any]
    unpack: Callable[[Any], tuple[tuple[Tensor, ...], float, float]]


MakeProgram = Callable[[Any], JaxProgram]  # from the module `jax`


class JaxModel:
    """The parameters and buffers of a torch module in JAX. Called with tensors as the module is, it evaluates."""

    def __init__(self, ranks: JaxRanks, module: nn.Module, program: JaxProgram) -> None:
        self.ranks = ranks
        self.parameters: Arrays = {name: ranks.take(one) for name, one in module.named_parameters()}
        buffers = module.named_buffers()
        self.buffers: Arrays = {name: ranks.take(one) for name, one in buffers if one.is_floating_point()}
        self._evaluate = ranks.jax.jit(program.evaluate)
        self._train = ranks.jax.jit(ranks.jax.value_and_grad(program.train, has_aux=True))

    def __call__(self, *given: object) -> Tensor:
        inputs = [self.ranks.take(one) for one in given if isinstance(one, Tensor)]
        return torch.from_numpy(np.array(self._evaluate(self.parameters, self.buffers, *inputs)))

    def compute_gradients(self, inputs: tuple[Tensor, ...]) -> tuple[Any, Any, Arrays]:
        """Loss, outputs and gradients of a pass. Running statistics move."""
        arrays = [self.ranks.take(one) for one in inputs]
        (loss, (outputs, self.buffers)), gradients = self._train(self.parameters, self.buffers, *arrays)
        return loss, outputs, gradients

    def average_buffers(self) -> None:
        """Replace buffers by their mean over ranks. Collective."""
        if self.buffers and self.ranks.size > 1:
            flat = self.ranks.all_reduce(self._pack(self.buffers) / self.ranks.size)
            self.buffers = self._unpack(flat, self.buffers)

    def sum_gradients(self, gradients: Arrays) -> Arrays:
        """Their sums over all ranks. Collective."""
        return self._unpack(self.ranks.all_reduce(self._pack(gradients)), gradients)

    def _pack(self, arrays: Arrays) -> Any:
        return self.ranks.jax.numpy.concatenate([one.reshape(-1) for one in arrays.values()])

    def _unpack(self, flat: Any, like: Arrays) -> Arrays:
        ends = np.cumsum([one.size for one in like.values()])[:-1]
        parts = self.ranks.jax.numpy.split(flat, ends)
        return {name: part.reshape(like[name].shape) for name, part in zip(like, parts, strict=True)}


class JaxOptimizer:
    """What a torch optimizer (SGD or AdamW) does with its options, in JAX."""

    def __init__(self, model: JaxModel, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        rules = {torch.optim.SGD: _sgd, torch.optim.AdamW: _adamw}
        if type(optimizer) not in rules:
            raise TaskUsageError(
                f"the backend jax has no optimizer {type(optimizer).__name__}",
                "Choose AdamW or SGD, or another backend.",
            )
        rule, names = rules[type(optimizer)], {parameter: name for name, parameter in module.named_parameters()}
        options = {names[one]: group for group in optimizer.param_groups for one in group["params"]}
        jax = self._jax = model.ranks.jax
        zeros = [{name: jax.numpy.zeros_like(one) for name, one in model.parameters.items()} for _ in range(2)]
        self.state: tuple[Arrays, Arrays] = (zeros[0], zeros[1] if rule is _adamw else {})

        def update(
            parameters: Arrays, gradients: Arrays, state: tuple[Arrays, Arrays], rate: Any, number: Any, clip: Any
        ) -> tuple[Arrays, tuple[Arrays, Arrays], Any]:
            norm = jax.numpy.sqrt(sum((one * one).sum() for one in gradients.values()))
            factor = jax.numpy.minimum(1.0, clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            after: dict[str, tuple[Any, ...]] = {}
            for name, value in parameters.items():
                own = [part[name] for part in state if part]
                own_rate = rate * options[name].get("rate_factor", 1.0)
                after[name] = rule(jax.numpy, options[name], value, factor * gradients[name], own, own_rate, number)
            columns = [{name: values[place] for name, values in after.items()} for place in range(len(after[name]))]
            return columns[0], (columns[1], columns[2] if len(columns) > 2 else {}), norm

        self._update = jax.jit(update, donate_argnums=(0, 2))

    def step(self, model: JaxModel, gradients: Arrays, rate: float, number: int, clip: float) -> Any:
        """Update the model (update `number`, from 1). Returns the norm of the gradients before they were clipped."""
        numbers = map(np.float32, (rate, number, clip))
        model.parameters, self.state, norm = self._update(model.parameters, gradients, self.state, *numbers)
        return norm


def _sgd(jnp: Any, options: Mapping[str, Any], value: Any, gradient: Any, state: Any, rate: Any, number: Any) -> Any:
    gradient = gradient + options["weight_decay"] * value
    (velocity,) = state
    velocity = options["momentum"] * velocity + gradient
    return value - rate * (gradient + options["momentum"] * velocity if options["nesterov"] else velocity), velocity


def _adamw(jnp: Any, options: Mapping[str, Any], value: Any, gradient: Any, state: Any, rate: Any, number: Any) -> Any:
    (beta1, beta2), (mean, square) = options["betas"], state
    value = value * (1 - rate * options["weight_decay"])
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient * gradient
    scale = jnp.sqrt(square) / jnp.sqrt(1 - beta2**number) + options["eps"]
    return value - rate / (1 - beta1**number) * mean / scale, mean, square


@dataclass
class JaxTrainer(Loop[P]):
    """One rank's training in JAX, of what `torch` would train. Made by `train_in_jax`."""

    torch: Trainer[P] = field(kw_only=True)
    make_program: MakeProgram = field(kw_only=True)

    def _attach(self) -> None:
        ranks = open_framework(self.world)
        self._program = self.make_program(ranks.jax)
        self._model = JaxModel(ranks, self.torch.model, self._program)
        self._optimizer = JaxOptimizer(self._model, self.torch.model, self.torch.make_optimizer(self.torch.model))
        self._observe = None if self.plan.protocol.is_on else getattr(self.torch.work, "observe", None)
        self._sent = {"messages": 0, "bytes": 0}
        if self.validate is not None:
            self.validate = replace(self.validate, model=self._model)  # type: ignore[type-var]

    def _update(self, update: Update[P], rate: float) -> bool:
        section, model, work = self.tracker.section, self._model, self.torch.work
        gradients: Arrays = {}
        losses = []
        for part in update.passes:
            with section("preprocessing"):
                data = work.prepare(part)
                inputs, divisor, weight = self._program.unpack(data)
            with section("backward"):  # one program of XLA computes the loss, too
                loss, outputs, own = model.compute_gradients(inputs)
                gradients = {name: gradients[name] + one for name, one in own.items()} if gradients else own
                loss.block_until_ready()
            losses.append((loss / divisor, weight))
            if self._observe is not None:
                with section("metrics"):
                    self._observe(torch.from_numpy(np.array(outputs)), data)
        share = update.weight / update.total
        gradients = {name: share * one for name, one in gradients.items()}
        if self.world.size > 1:
            with section("communication"):
                gradients = model.sum_gradients(gradients)
                model.ranks.jax.block_until_ready(gradients)
            self._sent["messages"] += 1
            self._sent["bytes"] += sum(4 * one.size for one in gradients.values())
        with section("optimizer"):
            clip = self.torch.clip or np.inf
            norm = self._optimizer.step(model, gradients, rate, self.position.total + 1, clip)
            if not np.isfinite(norm):
                raise make_divergence_error(NOT_FINITE)
        with section("metrics"):
            for value, weight in losses:
                self.losses.add(value, weight)
        return True

    def _read_losses(self, losses: list[Any]) -> list[float]:
        return [float(loss) for loss in losses]

    def _collect_training_values(self) -> Values:
        return self.torch._collect_training_values()

    def _set_mode(self, training: bool) -> None:
        """The functions say which it is."""

    def _check_replicas(self) -> Values:
        compare_checksums(self.world, (np.asarray(one).tobytes() for one in self._model.parameters.values()))
        self._model.average_buffers()
        return {}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        options = {**self.details.get("options", {}), "compile": "xla", "precision": "fp32"}
        return {
            "communication": {**self._sent, "updates": self.position.total},
            "precision": "fp32",
            "options": {**options, "reduction": "after the backward pass"},
        }

    def _checkpoint_path(self) -> Path:
        return super()._checkpoint_path().with_suffix(".npz")

    @property
    def _stored(self) -> list[Arrays]:
        return [self._model.parameters, self._model.buffers, *self._optimizer.state]

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        save_arrays(
            self.world, path, self.name, state, [np.asarray(one) for part in self._stored for one in part.values()]
        )

    def _read(self, path: Path) -> Mapping[str, Any]:
        state, arrays = load_arrays(path, self.name, self.identity)
        left = iter(arrays)
        for part in self._stored:
            part.update({name: self._model.ranks.jax.numpy.asarray(next(left)) for name in part})
        return state


def train_in_jax(trainer: Trainer[P], make_program: MakeProgram) -> JaxTrainer[P]:
    """The training of `trainer` in JAX. Raises TaskUsageError for what only torch does."""
    precision = trainer.precision.used if trainer.precision else "fp32"
    for is_asked, what, instead in (
        (trainer.world.contract.method, "exchange gradients by a method", "Leave out --method."),
        (precision != "fp32", f"compute in {precision}", "--set precision=fp32"),
    ):
        if is_asked:
            raise TaskUsageError(f"a training with the backend jax cannot {what}", instead)
    shared = {item.name: getattr(trainer, item.name) for item in fields(Loop)}
    return JaxTrainer(**shared, torch=trainer, make_program=make_program)
