"""Energy of a run: joules of its GPUs, per sample, per token, and to the goal.

Sources, the best first: the counter of the GPU itself; else the sampled power, integrated over time, which is an
estimate. CPUs, memory, fans, disks, network cards and power supplies are not included.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.results.archive.files import Archive

GPU_SAMPLES = "/gpu.jsonl"  # in a rank's output folder, see task_images/gpu.py
GPU_COUNTER, GPU_POWER = "GPU counter", "GPU power, integrated"
MOST = 1e15  # of any figure of a sample; joules of a year of a large machine room
FIGURES = JOULES, PER_SAMPLE, PER_TOKEN = "energy", "energy per sample", "energy per token"


class Energy(Struct, frozen=True):
    """The energy over the sampled time, and the energy per sample of training at the mean power of that time.

    joules     of all devices that were sampled; for a run that reached its goal, the energy to the goal
    sources    of the figures; with GPU_POWER among them they are estimates
    """

    joules: float
    per_sample: float | None
    per_token: float | None
    sources: tuple[str, ...]

    @property
    def is_estimate(self) -> bool:
        """Whether a part was integrated from samples instead of counted by the device."""
        return GPU_POWER in self.sources

    @property
    def label(self) -> str:
        """ "GPU counter", with "estimate" before it where a part is one."""
        return f"{'estimate: ' if self.is_estimate else ''}{' + '.join(self.sources)}"


class _Used(Struct, frozen=True):
    joules: float
    seconds: float
    source: str


def find_energy(archive: Archive) -> Energy | None:
    """The energy of a run from its samples; None if nothing was sampled."""
    found = _read_gpus(archive)
    if not found:
        return None
    watts = sum(one.joules / one.seconds for one in found)
    result = archive.result
    details: Mapping[str, Any] = result.get("details") or {}
    samples, seconds = result["samples"], result["task_seconds"]["training"] or result["task_seconds"]["wall"]
    per_sample = watts * seconds / samples if samples and seconds else None
    tokens, batch = _amount(details.get("tokens_per_update")), _amount(details.get("global_batch"))
    return Energy(
        sum(one.joules for one in found),
        per_sample,
        per_sample * batch / tokens if per_sample is not None and tokens and batch else None,
        tuple(sorted({one.source for one in found}, reverse=True)),
    )


def figures_of(archive: Archive) -> dict[str, float]:
    """The figures of `find_energy` in joules, by the names in FIGURES; empty without any."""
    found = find_energy(archive)
    if found is None:
        return {}
    named = {JOULES: found.joules, PER_SAMPLE: found.per_sample, PER_TOKEN: found.per_token}
    return {name: value for name, value in named.items() if value is not None}


def _read_gpus(archive: Archive) -> list[_Used]:
    """One entry for each GPU: ranks that share one have sampled the same GPU, and the longest series counts."""
    best: dict[tuple[str, str], _Used] = {}
    nodes = {str(state["rank"]): state["node"] for state in archive.result["worker_states"]}
    for name in archive.names:
        if not name.endswith(GPU_SAMPLES):
            continue
        try:
            rows = list(archive.rows(name))
        except DamagedArchive:  # any task may write a file of that name
            continue
        used = _sum_gpu(rows)
        if used is None:
            continue
        rank = name.removesuffix(GPU_SAMPLES).rpartition("-")[2]
        address = next((row["address"] for row in rows if isinstance(row.get("address"), str)), f"rank {rank}")
        place = nodes.get(rank) or "", address
        if place not in best or used.seconds > best[place].seconds:
            best[place] = used
    return list(best.values())


def _sum_gpu(rows: Sequence[Mapping[str, Any]]) -> _Used | None:
    """By the counter if it never falls and no sample of power lacks it, else the integral of power by trapezoids. A GPU
    may have only one of them."""
    counted, powers = (_read_series(rows, name) for name in ("energy_joules", "power_watts"))
    has_counter = len(counted) >= len(powers) and all(a[1] <= b[1] for a, b in pairwise(counted))
    series = counted if has_counter else powers
    seconds = series[-1][0] - series[0][0] if series else 0.0
    if seconds <= 0:
        return None
    if has_counter:
        return _Used(counted[-1][1] - counted[0][1], seconds, GPU_COUNTER)
    joules = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(powers))
    return _Used(joules, seconds, GPU_POWER)


def _read_series(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Time and value of the rows that have both, in the order of time."""
    pairs = ((_amount(row.get("time")), _amount(row.get(name))) for row in rows)
    return sorted((time, value) for time, value in pairs if time is not None and value is not None)


def _amount(value: object) -> float | None:
    return float(value) if is_finite_number(value) and 0 <= value <= MOST else None
