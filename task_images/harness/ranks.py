"""What measuring and reporting ask of the ranks of a run, whatever framework they train with."""

from collections.abc import Sequence
from typing import Any, Protocol


class Ranks(Protocol):
    """This rank among all ranks. `distributed.World` is torch's."""

    rank: int
    size: int
    backend: str
    threads: int

    @property
    def is_first(self) -> bool: ...

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values` (equally many on each), by rank, on every rank. One collective, float64."""
        ...

    def framework_facts(self) -> dict[str, Any]:
        """For the environment event: framework, framework_version, device, device_name."""
        ...

    def backend_facts(self) -> dict[str, Any]:
        """What a result should say of the backend; empty where there is nothing to say."""
        ...
