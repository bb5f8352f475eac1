"""The size of a model."""

from collections.abc import Iterable

from torch import Tensor


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Number of elements in `parameters`, including those on the meta device."""
    return sum(parameter.numel() for parameter in parameters)
