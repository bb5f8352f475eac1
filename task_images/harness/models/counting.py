"""The size of a model."""

from collections.abc import Iterable

from torch import Tensor


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Number of scalars in `parameters`; those on the meta device count too."""
    return sum(parameter.numel() for parameter in parameters)
