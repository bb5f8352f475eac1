"""How large the buffers are: the specification's grid of elements, or a list of bytes, and what fits a collective."""

from collections.abc import Iterable


def grid(min_exponent: float, max_exponent: float, count: int, *, duplicates: bool = False) -> list[int]:
    """`count` numbers of elements, evenly spaced on a log scale from 10^min to 10^max and cut to integers, ascending.

    Cutting makes the smallest ones equal; they are measured once unless `duplicates`.
    """
    step = (max_exponent - min_exponent) / max(1, count - 1)
    # The tiny addition keeps 10^8, computed as 99999999.99, what it is.
    values = [int(10 ** (min_exponent + index * step) + 1e-6) for index in range(count)]
    return values if duplicates else sorted(set(values))


def from_bytes(sizes: Iterable[int], element_size: int) -> list[int]:
    """Numbers of elements for sizes in bytes, one at least, ascending and each once."""
    return sorted({max(1, size // element_size) for size in sizes})


def in_parts(elements: Iterable[int], ranks: int) -> list[int]:
    """The nearest numbers below that `ranks` equal parts make up (one element in each at least)."""
    return sorted({max(1, number // ranks) * ranks for number in elements})
