"""The seeds' public table of methods, predicted from few of its cells and held against the others.

The rule was fixed before the table was looked at with this code: for each connection, one cell (BSP-A2A, ResNet-50, 8
GPUs) gives the seconds per byte, a second one (WFBP-A2A, ResNet-50, 8 GPUs) the seconds per message and hop; the
authors' rate of one GPU gives the computation. Nothing else is fitted. A method's groups are built by the functions
that a run uses. The feasibility study had used the same cells and an O(n^2) plan; its figures were known.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

from mlbench_cli.simulator.calibration import solve
from mlbench_cli.simulator.collectives import RingCollectives
from mlbench_cli.simulator.models import MODELS, workload_of
from mlbench_cli.simulator.step import Step, simulate_step
from mlbench_cli.simulator.workload import Workload
from mlbench_cli.util.csv_text import read_table
from task_images.comm.presets import resolve

GPUS_PER_NODE = 4
METHODS = {
    "BSP-A2A": "bsp",
    "WFBP-A2A": "wfbp",
    "MG-WFBP": "mgwfbp",
    "ByteScheduler-A2A": "bytescheduler",
    "BSP-PS": "bsp-ps",
    "WFBP-PS": "wfbp-ps",
    "ByteScheduler-PS": "bytescheduler-ps",
}
SUPPORTED = ("BSP-A2A", "MG-WFBP")  # for which this is a claim; the others show how far the model goes
ALL_REDUCE = ("BSP-A2A", "WFBP-A2A", "MG-WFBP")  # all-reduces, without priorities or servers
MIN_DIFFERENCE = 0.03  # between two rates of which one is said to be higher
_REFERENCE, _RATE_CELL, _START_CELL = "ResNet-50", "BSP-A2A", "WFBP-A2A"
_CELL_GPUS = 8
_DATA = Path(__file__).parents[1] / "results" / "analysis" / "published_rates.csv"


@dataclass(frozen=True)
class PublishedCell:
    """One published measurement: samples per second of all GPUs."""

    model: str
    batch: int
    network: str
    method: str
    gpus: int
    rate: float

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.gpus * self.batch / self.rate


@dataclass(frozen=True)
class PublishedComparison:
    """A measurement and its prediction. `is_calibration` marks the cells that the constants are from."""

    cell: PublishedCell
    predicted_rate: float
    is_calibration: bool

    @property
    def error(self) -> float:
        """Relative error of the predicted rate."""
        return self.predicted_rate / self.cell.rate - 1


@dataclass(frozen=True)
class Constants:
    """What a connection's two cells give: seconds per hop of a message, seconds per byte."""

    alpha: float
    beta: float


@cache
def _read_cells() -> tuple[PublishedCell, ...]:
    return tuple(
        PublishedCell(
            *(row["model"], int(row["batch_size"]), row["network"], row["method"], int(row["gpus"])),
            float(row["rate"]),
        )
        for row in read_table(_DATA)
    )


def load_cells() -> tuple[PublishedCell, ...]:
    """The table's cells of more than one node: what one node measures says nothing of the network."""
    return tuple(cell for cell in _read_cells() if cell.gpus > GPUS_PER_NODE)


def find_single_rate(model: str) -> float:
    """The authors' constant for one GPU, in samples per second."""
    return next(cell.rate for cell in _read_cells() if (cell.model, cell.gpus) == (model, 1))


def calibrate(cells: Sequence[PublishedCell], network: str, alpha: float | None = None) -> Constants:
    """The constants of a connection from its two cells; with seconds per hop from elsewhere, from the first one."""
    single = _workload(_REFERENCE, _batch(cells, _REFERENCE))
    rate_cell = _find(cells, network, _RATE_CELL)
    volume = 2 * (_CELL_GPUS - 1) / _CELL_GPUS * single.size
    starts = 2 * (_CELL_GPUS - 1) * (alpha or 0.0)
    beta = (rate_cell.seconds - single.seconds - starts) / volume
    if alpha is not None:
        return Constants(alpha, beta)
    start_cell = _find(cells, network, _START_CELL)

    def seconds(alpha: float) -> float:
        return _step(single, _START_CELL, _CELL_GPUS, Constants(alpha, beta)).seconds

    return Constants(solve(seconds, start_cell.seconds, 0.0, 5e-3), beta)


def compare_published(
    alpha: float | None = None, watch: Callable[[Sequence[PublishedCell]], Iterable[PublishedCell]] = iter
) -> list[PublishedComparison]:
    """Every cell with its prediction. `alpha` are seconds per hop that are not taken from the table, see calibrate.
    The cells are taken through `watch`."""
    cells = load_cells()
    constants = {network: calibrate(cells, network, alpha) for network in {cell.network for cell in cells}}
    return [_compare(cell, constants[cell.network]) for cell in watch(cells)]


def summarize(found: Sequence[PublishedComparison]) -> Iterator[tuple[str, int, float, float]]:
    """By method: its name, number of cells that were predicted, mean and greatest absolute error."""
    for method in METHODS:
        errors = [abs(item.error) for item in found if item.cell.method == method and not item.is_calibration]
        if errors:
            yield method, len(errors), sum(errors) / len(errors), max(errors)


@dataclass(frozen=True)
class Order:
    """How well predictions sort the methods of each model, network and number of GPUs.

    fastest   settings in which the method predicted to be the fastest is
    whole     settings in which all methods are in their order
    right     pairs of methods of a setting, at least MIN_DIFFERENCE apart, that are; `pairs`: all of them
    """

    settings: int
    fastest: int
    whole: int
    right: int
    pairs: int


def compare_order(found: Sequence[PublishedComparison], methods: Collection[str] = tuple(METHODS)) -> Order:
    """The order of `methods` as predicted, against the order as measured."""
    settings: dict[tuple[str, str, int], list[PublishedComparison]] = {}
    for item in found:
        if item.cell.method in methods:
            settings.setdefault((item.cell.model, item.cell.network, item.cell.gpus), []).append(item)
    fastest = whole = right = pairs = 0
    for items in settings.values():
        measured = [item.cell.method for item in sorted(items, key=lambda item: -item.cell.rate)]
        predicted = [item.cell.method for item in sorted(items, key=lambda item: -item.predicted_rate)]
        fastest += measured[0] == predicted[0]
        whole += measured == predicted
        for one, other in combinations(items, 2):
            ratio = one.cell.rate / other.cell.rate
            if max(ratio, 1 / ratio) > 1 + MIN_DIFFERENCE:
                pairs += 1
                right += (ratio > 1) == (one.predicted_rate > other.predicted_rate)
    return Order(len(settings), fastest, whole, right, pairs)


def _compare(cell: PublishedCell, constants: Constants) -> PublishedComparison:
    step = _step(_workload(cell.model, cell.batch), cell.method, cell.gpus, constants)
    is_calibration = (cell.model, cell.gpus) == (_REFERENCE, _CELL_GPUS) and cell.method in (_RATE_CELL, _START_CELL)
    return PublishedComparison(cell, cell.gpus * cell.batch / step.seconds, is_calibration)


def _step(workload: Workload, method: str, gpus: int, constants: Constants) -> Step:
    preset = resolve(METHODS[method])
    ring = RingCollectives(gpus, constants.alpha, constants.beta)
    # Nodes sum inside themselves first; there are as many servers as nodes, on separate machines.
    return simulate_step(workload, preset, ring, servers=gpus)


@cache
def _workload(model: str, batch: int) -> Workload:
    return workload_of(MODELS[model](), batch / find_single_rate(model))


def _batch(cells: Sequence[PublishedCell], model: str) -> int:
    return next(cell.batch for cell in cells if cell.model == model)


def _find(cells: Sequence[PublishedCell], network: str, method: str) -> PublishedCell:
    wanted = (_REFERENCE, network, method, _CELL_GPUS)
    return next(cell for cell in cells if (cell.model, cell.network, cell.method, cell.gpus) == wanted)
