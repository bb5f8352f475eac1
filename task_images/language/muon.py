"""Muon (Jordan et al. 2024): updates matrices by their orthogonalized momentum, and other parameters by AdamW.

For a matrix W with gradient g:  m <- mu m + (1 - mu) g;  u = (1 - mu) g + mu m;  O = orthogonalize(u)
                                 W <- (1 - rate decay) W - rate sqrt(max(1, rows / columns)) O  Most of the work is the
                                 orthogonalization, about thirty products of matrices of this size. All ranks have the
                                 same gradients, so each orthogonalizes a share of the matrices, and they exchange the
                                 results. Every rank has the full momentum, so a checkpoint fits any number of ranks.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = 0.95
# Coefficients (a, b, c) of X <- a X + (b A + c A^2) X with A = X X^T. `fast`: those of the published Muon, with final
# singular values between 0.7 and 1.2. `exact` converges to 1 (modded-nanogpt's optimizer track).
ITERATIONS = {"fast": ((3.4445, -4.7750, 2.0315), 5), "exact": ((2.0, -1.5, 0.5), 12)}
EPSILON = 1e-7

Split = Callable[[Tensor], list[Tensor]]
Join = Callable[..., Tensor]


class Muon(torch.optim.AdamW):
    """Updates groups with `muon` true by Muon, the others by AdamW.

    ranks    number of ranks that share the work; `rank`: this one
    splits   parameter -> how to split it into separate matrices and to join their updates (fused layers)
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        iterations: str = "fast",
        momentum: float = MOMENTUM,
        rank: int = 0,
        ranks: int = 1,
        splits: dict[nn.Parameter, tuple[Split, Join]] | None = None,
        **adamw: Any,
    ) -> None:
        super().__init__([{"muon": False, **group} for group in groups], **adamw)
        self._iterations, self._momentum, self._rank, self._ranks = iterations, momentum, rank, ranks
        self._splits = splits or {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one update of all groups. Collective if several ranks share the work."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            found = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._move(group)
        return found

    def _move(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group."""
        members = [member for member in group["params"] if member.grad is not None]
        directions = [self._direct(member) for member in members]
        parts = [self._cut(member, one) for member, one in zip(members, directions, strict=True)]
        made = iter(self._orthogonalize_all([part for row in parts for part in row]))
        for member, row in zip(members, parts, strict=True):
            scaled = [next(made) * max(1.0, part.shape[0] / part.shape[1]) ** 0.5 for part in row]
            joined = self._splits[member][1](*scaled) if member in self._splits else scaled[0]
            member.mul_(1 - group["lr"] * group["weight_decay"])
            member.add_(joined.to(member.dtype), alpha=-group["lr"])

    def _direct(self, member: Tensor) -> Tensor:
        """Update the momentum with the gradient, and return Nesterov's direction."""
        assert member.grad is not None
        state = self.state[member]
        if not state:
            state["step"], state["momentum"] = torch.zeros(()), torch.zeros_like(member)
        state["step"] += 1
        momentum = state["momentum"].lerp_(member.grad, 1 - self._momentum)
        return member.grad.lerp(momentum, self._momentum)

    def _cut(self, member: Tensor, direction: Tensor) -> list[Tensor]:
        return self._splits[member][0](direction) if member in self._splits else [direction]  # type: ignore[index]

    def _orthogonalize_all(self, matrices: list[Tensor]) -> list[Tensor]:
        """Orthogonalize all matrices, batched by shape for fewer and larger products. Each rank computes a share of
        every shape and receives the others'."""
        by_shape: dict[torch.Size, list[int]] = {}
        for number, matrix in enumerate(matrices):
            by_shape.setdefault(matrix.shape, []).append(number)
        found = list(matrices)
        for numbers in by_shape.values():
            share = -(-len(numbers) // self._ranks)
            own = [matrices[number] for number in numbers[self._rank * share : (self._rank + 1) * share]]
            rest = [torch.zeros_like(matrices[numbers[0]])] * (share - len(own))  # all ranks send the same number
            made = orthogonalize(torch.stack([*own, *rest]), self._iterations)
            if self._ranks > 1:
                every = made.new_empty((self._ranks * share, *made.shape[1:]))
                dist.all_gather_into_tensor(every, made)
                made = every
            for number, matrix in zip(numbers, made, strict=False):
                found[number] = matrix
        return found


def orthogonalize(matrices: Tensor, iterations: str = "fast") -> Tensor:
    """Matrices [..., rows, columns] with all singular values close to 1, by Newton-Schulz iterations in bf16."""
    (a, b, c), count = ITERATIONS[iterations]
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(count):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    found: Tensor = x.mT if is_tall else x
    return found
