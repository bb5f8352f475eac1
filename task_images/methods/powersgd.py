"""PowerSGD (Vogels et al. 2019, algorithms 1 and 2): each matrix travels as two thin factors."""

from __future__ import annotations

from collections.abc import Sequence

from task_images.methods import torch
from task_images.methods.base import Option
from task_images.methods.compressed import Compressed

LEAST_GAIN = 2  # a matrix is sent as it is if its factors would not be smaller by this factor


class PowerSgd(Compressed):
    """One step of subspace iteration from the right factor of the last update. Both factors are summed over ranks."""

    name = "powersgd"
    summary = "approximates matrices by rank 4, with error feedback and warm start"
    source = "Vogels et al. 2019, arXiv:1905.13727"
    formula = "2 (P-1)/P (4 r (n+m) per n x m matrix, 4 d otherwise)"
    options = {  # noqa: RUF012
        **Compressed.options,
        "rank": Option(4, 1, 4096, "columns of the factors"),
        "warmup": Option(0, 0, 10**6, "first updates that are not compressed"),
    }
    late_options = ("warmup",)
    collective = "allreduce"

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Sum the left factors and what is not compressed, orthogonalize, then sum the right factors."""
        right = self.state.setdefault("factor", {})
        matrices, start = {}, 0
        for name, tensor in zip(names, tensors, strict=True):
            parameter = self._slots[name].parameter
            matrix = tensor.view(len(parameter) if parameter.dim() > 1 else 1, -1)
            width = min(self.values["rank"], *matrix.shape)
            if self.update > self.values["warmup"] and self._is_worth_it(matrix, width):
                matrices[name] = matrix
                if name not in right:
                    drawn = torch.randn(matrix.shape[1], width, generator=torch.Generator().manual_seed(start * 31))
                    right[name] = drawn.to(matrix)
            start += tensor.numel()
        plain = zip(names, tensors, strict=True)
        sent = [matrices[name] @ right[name] if name in matrices else tensor for name, tensor in plain]
        sums, own = self.link.sum(sent), list(tensors)
        left = {name: orthogonalize(part) for name, part in zip(names, sums, strict=True) if name in matrices}
        mine = {name: matrices[name].T @ basis for name, basis in left.items()}
        for name, factor in zip(mine, self.link.sum(list(mine.values())) if mine else (), strict=True):
            right[name] = factor
        for number, name in enumerate(names):
            if name in left:
                sums[number] = (left[name] @ right[name].T).reshape(-1)
                own[number] = (left[name] @ mine[name].T).reshape(-1)
        return sums, own

    @staticmethod
    def _is_worth_it(matrix: torch.Tensor, width: int) -> bool:
        rows, columns = matrix.shape
        # Full rank is exact, so it is used even though it saves nothing.
        return (rows + columns) * width * LEAST_GAIN < rows * columns or width == min(rows, columns) > 1


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """matrix [n, r] with orthonormalized columns; columns of zeros get other directions instead of NaN."""
    # The decomposition supports only 32 and 64 bits.
    basis: torch.Tensor = torch.linalg.qr(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))[0]
    return basis.to(matrix.dtype)
