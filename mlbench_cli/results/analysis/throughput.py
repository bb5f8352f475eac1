"""A run's throughput: the one definition that all tables, figures, comparisons and gates use."""

import math
from collections.abc import Mapping
from typing import Any

from mlbench_cli.model.goals import is_finite_number


def throughput_of(result: Mapping[str, Any]) -> tuple[float, str] | None:
    """The samples per second of all ranks, and their unit; None if the run counted none. `result` is a result.json.

    With the throughput protocol it is the mean of the timed blocks. Otherwise it is all samples over the seconds of
    training: with waiting for data, without validation.
    """
    details, samples = result.get("details") or {}, result.get("samples")
    protocol = details.get("throughput_protocol")
    rates = protocol.get("rates") if isinstance(protocol, Mapping) else None
    if isinstance(protocol, Mapping) and isinstance(rates, list) and rates and all(map(is_finite_number, rates)):
        return math.fsum(rates) / len(rates), str(protocol.get("unit", "samples"))
    timings = {name: spread["rank0"] for name, spread in (result.get("timings") or {}).items()}
    wall = (result.get("task_seconds") or {}).get("wall") or math.fsum(timings.values())
    training = wall - timings.get("validation", 0.0)
    return (samples / training, "samples") if samples and training > 0 else None
