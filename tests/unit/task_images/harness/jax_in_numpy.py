"""The part of JAX that mlbench uses, in NumPy and float64, for tests of what mlbench makes of it.

Nothing is compiled. Gradients are central differences, which are exact for quadratic losses.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, scaled_dot_product_attention

from task_images.harness.jax_ranks import JaxRanks

STEP = 2.0**-8


class Array(np.ndarray[Any, Any]):
    """An array for whose value one can wait."""

    def block_until_ready(self) -> "Array":
        return self


class Jax:
    """The module `jax`."""

    def __init__(self) -> None:
        self.numpy = np
        self.nn = SimpleNamespace(
            relu=lambda x: np.maximum(x, 0),
            silu=lambda x: x / (1 + np.exp(-x)),
            log_softmax=lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True)),
            dot_product_attention=attend,
        )
        self.lax = SimpleNamespace(conv_general_dilated=convolve)

    def jit(self, function: Any, donate_argnums: tuple[int, ...] = ()) -> Any:
        return function

    def block_until_ready(self, arrays: Any) -> Any:
        return arrays

    def value_and_grad(self, function: Any, has_aux: bool) -> Any:
        assert has_aux

        def differentiate(parameters: dict[str, Any], *inputs: Any) -> Any:
            loss, more = function(parameters, *inputs)
            gradients = {name: np.zeros_like(one) for name, one in parameters.items()}
            for name, one in parameters.items():
                for place in np.ndindex(one.shape):
                    sides = []
                    for step in (STEP, -STEP):
                        moved = one.copy()
                        moved[place] += step
                        sides.append(float(function({**parameters, name: moved}, *inputs)[0]))
                    gradients[name][place] = (sides[0] - sides[1]) / (2 * STEP)
            return (np.asarray(loss).view(Array), more), gradients

        return differentiate


def attend(query: Any, key: Any, value: Any, *, is_causal: bool) -> Any:
    """Attention of [B, T, heads, size]; several neighboring heads of the queries share a key."""
    shared = query.shape[2] // key.shape[2]
    turned = [torch.from_numpy(one.astype(np.float64)).transpose(1, 2) for one in (query, key, value)]
    keys, values = (one.repeat_interleave(shared, 1) for one in turned[1:])
    return scaled_dot_product_attention(turned[0], keys, values, is_causal=is_causal).transpose(1, 2).numpy()


def convolve(x: Any, kernel: Any, strides: tuple[int, int], padding: Any, dimension_numbers: Any) -> Any:
    assert dimension_numbers == ("NCHW", "OIHW", "NCHW")
    around = [one for one, other in padding if one == other]
    return conv2d(torch.from_numpy(x), torch.from_numpy(kernel), None, strides, around).numpy()


class NumpyRanks(JaxRanks):
    """The ranks of a run in JAX. `add` has what the other ranks bring to a sum, given this rank's row."""

    def __init__(self, size: int = 1, add: Callable[[Any], Any] = np.zeros_like) -> None:
        self.rank, self.size, self.jax = 0, size, Jax()
        self._add = add
        self.rows: list[list[float]] = []

    def take(self, host: Tensor) -> Any:
        return host.detach().numpy().copy()

    def all_reduce(self, row: Any) -> Any:
        self.rows.append(row.tolist())
        return row + self._add(row)

    def close(self) -> None: ...
