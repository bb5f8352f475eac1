"""What others published: results of MLBench 3, and throughput as named series, from the table of the 2020 survey and
from logs of its programs.

A series is a method on a network, with a mean rate and a deviation for each number of workers. Selected by texts:

    survey-2020                            all 63 series of the published table
    survey-2020/ResNet-50/10GbE/MG-WFBP    those whose words all occur: model, network and method, in any order
    PATH                                   logs or a Markdown table in the form of ddl-benchmarks: a file or a folder
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.util.csv_text import read_table
from mlbench_cli.util.text import counted

SURVEY = "survey-2020"
TABLES = (SURVEY,)
_RATES, _RESULTS = (Path(__file__).with_name(f"published_{name}.csv") for name in ("rates", "results"))
_NETWORKS = {"0": "10GbE", "1": "100GbIB", "2": "100GbE"}  # the switch "rdma" of ddl-benchmarks
_MODELS = {"resnet50": "ResNet-50", "bert": "BERT-Large", "bert_base": "BERT-Base"}
_METHODS = {
    "bspa2a": "BSP-A2A",
    "wfbp": "WFBP-A2A",
    "mgwfbp": "MG-WFBP",
    "bytescheduler": "ByteScheduler-A2A",
    "bspps": "BSP-PS",
    "wfbpps": "WFBP-PS",
    "byteschedulerps": "ByteScheduler-PS",
}
_TOTAL = re.compile(r"^.*Total (?P<unit>img|sen)/sec on (?P<workers>\d+) GPU\(s\): (?P<rate>[0-9.]+)", re.MULTILINE)
_LOG_NAME = re.compile(
    r"rdma-(?P<rdma>\d)-method-(?P<method>\w+)-dnn-(?P<dnn>\w+)-bs-(?P<bs>\d+)-nworker-(?P<workers>\d+)"
)
_CELL = re.compile(r"([0-9.]+)(?:\s*\+-\s*([0-9.]+))?")
_UNITS = {"img": "images", "sen": "sentences"}


class Rate(Struct, frozen=True):
    """Units per second of all workers. `deviation`: over repeated runs; None if there is none."""

    workers: int
    rate: float
    deviation: float | None


class PublishedSeries(Struct, frozen=True):
    """A published measurement. `network` and `method` are the source's terms."""

    source: str
    model: str
    batch_size: int
    network: str
    method: str
    unit: str
    rates: tuple[Rate, ...]

    @property
    def name(self) -> str:
        """Source, model, network and method in one line."""
        return f"{self.source} {self.model} {self.network} {self.method}"


def select_series(texts: Iterable[str]) -> tuple[PublishedSeries, ...]:
    """The series that the texts name. Raises UsageError for an unknown table, NotFoundError for an unreadable path."""
    return tuple(series for text in texts for series in _select(text))


def _select(text: str) -> Sequence[PublishedSeries]:
    table, *words = text.split("/")
    if table in TABLES:
        known = load_survey()
        found = [series for series in known if all(_has_word(series, word) for word in words if word)]
        if found:
            return found
        values = sorted({value for series in known for value in _words_of(series)})
        raise UsageError(
            f'The published table {table} has no series "{text}".', hint=f"Its labels: {', '.join(values)}"
        )
    path = Path(text)
    if not path.exists():
        raise UsageError(
            f'There is no published table or file "{text}".{did_you_mean(table, TABLES)}',
            hint=f"Tables: {', '.join(TABLES)}. Or the path of logs in the form of ddl-benchmarks.",
        )
    return read_logs(path)


def _words_of(series: PublishedSeries) -> tuple[str, ...]:
    return series.model, series.network, series.method


def _has_word(series: PublishedSeries, word: str) -> bool:
    return word.lower() in (value.lower() for value in _words_of(series))


def load_survey() -> list[PublishedSeries]:
    """The published table of 2020: every series begins with the rate of one GPU."""
    ones: dict[str, Rate] = {}
    series: dict[tuple[str, str, str], list[Rate]] = {}
    facts: dict[tuple[str, str, str], tuple[int, str]] = {}
    for row in read_table(_RATES):
        deviation = float(row["deviation"]) if row["deviation"] else None
        rate = Rate(int(row["gpus"]), float(row["rate"]), deviation)
        if row["method"] == "single":
            ones[row["model"]] = rate
            continue
        key = (row["model"], row["network"], row["method"])
        series.setdefault(key, [ones[row["model"]]]).append(rate)
        facts[key] = (int(row["batch_size"]), row["unit"])
    return [
        PublishedSeries(SURVEY, model, facts[key][0], network, method, facts[key][1], tuple(rates))
        for key, rates in series.items()
        for model, network, method in [key]
    ]


def read_logs(path: Path) -> list[PublishedSeries]:
    """The series in logs of ddl-benchmarks (lines "Total img/sec on N GPU(s): RATE", one per run) or in its Markdown
    table: one file, or all *.log and *.md files of a folder. Raises NotFoundError if there is none."""
    files = sorted([*path.rglob("*.log"), *path.rglob("*.md")]) if path.is_dir() else [path]
    tables: list[PublishedSeries] = []
    logs: dict[tuple[str, int, str, str, str], dict[int, list[float]]] = {}
    for file in files:
        try:
            text = file.read_text("utf-8", "replace")
        except OSError as error:
            raise NotFoundError(f"{file} cannot be read: {error.strerror or error}.") from None
        tables += parse_table(text, path.name)
        for key, workers, rate in _rates_in_log(file.name, text):
            logs.setdefault(key, {}).setdefault(workers, []).append(rate)
    for (model, batch_size, network, method, unit), by_workers in logs.items():
        rates = [
            Rate(workers, statistics.fmean(values), statistics.pstdev(values) if len(values) > 1 else None)
            for workers, values in sorted(by_workers.items())
        ]
        tables.append(PublishedSeries(path.name, model, batch_size, network, method, unit, tuple(rates)))
    if not tables:
        raise NotFoundError(
            f'{path} has no rates: neither "Total img/sec on 4 GPU(s): 925.0" nor a ddl-benchmarks table.',
            hint=f"A log of its programs, its results' README.md, or a table that is shipped: {', '.join(TABLES)}",
        )
    return tables


def _rates_in_log(name: str, text: str) -> Iterator[tuple[tuple[str, int, str, str, str], int, float]]:
    found = _LOG_NAME.search(name)
    facts = found.groupdict() if found else {}
    for total in _TOTAL.finditer(text):
        dnn = facts.get("dnn", "")
        method = facts.get("method", "")
        key = (
            _MODELS.get(dnn, dnn or Path(name).stem),
            int(facts.get("bs", 0)),
            _NETWORKS.get(facts.get("rdma", ""), ""),
            _METHODS.get(method, method),
            _UNITS[total["unit"]],
        )
        yield key, int(total["workers"]), float(total["rate"])


def parse_table(text: str, source: str) -> list[PublishedSeries]:
    """The series of a Markdown table with the columns DNN, BS, CONNECTION, METHOD and N GPU(s)."""
    series = []
    workers: list[int] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[:1] == ["DNN"]:
            workers = [int(match[0]) for cell in cells if (match := re.match(r"(\d+)(?= GPU)", cell))]
            continue
        if not workers or len(cells) != 4 + len(workers) or set(cells[0]) <= {"-", " "}:
            continue
        model, batch_size, network, method, *values = cells
        unit = "images" if "net" in model.lower() else "sentences"
        rates = [
            Rate(count, float(match[1]), float(match[2]) if match[2] else None)
            for count, value in zip(workers, values, strict=True)
            if (match := _CELL.fullmatch(value))
        ]
        if batch_size.isdecimal() and rates:
            connection = network.partition(" ")[0]
            series.append(PublishedSeries(source, model, int(batch_size), connection, method, unit, tuple(rates)))
    return series


# --- MLBench 3 --------------------------------------------------------------------------------------------------------

# Tasks that repeat a published one.
_SAME = {"cifar10_resnet20_ddp": "cifar10_resnet20", "cifar10_resnet20_tensorflow": "cifar10_resnet20"}
# Metric -> name of the phase, in the order of a step. "compute" is the sum of the first four.
PHASES = {
    "compute_seconds": "compute",
    **{f"{name}_seconds": name for name in ("forward", "loss", "backward", "optimizer")},
    "communication_seconds": "communication",
}


class PublishedValue(Struct, frozen=True):
    """One published value. `is_approximate`: read from a plot, within 2 to 5 %."""

    task: str
    variant: str
    metric: str
    workers: int
    value: float
    unit: str
    is_approximate: bool
    source: str

    @property
    def name(self) -> str:
        """The series in a chart."""
        return f"published: {self.variant}"


@cache
def read_published() -> tuple[PublishedValue, ...]:
    """All published values, with sources."""
    return tuple(
        PublishedValue(
            *(row["task"], row["variant"], row["metric"], int(row["workers"]), float(row["value"]), row["unit"]),
            row["approx"] == "yes",
            row["source"],
        )
        for row in read_table(_RESULTS)
    )


def published_values(task: str) -> list[PublishedValue]:
    """The published values of a task or of the one that it repeats."""
    return [item for item in read_published() if item.task == _SAME.get(task, task)]


def published_phases(task: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The published bars of a task: variant and rows. If only total and communication are known, the remainder is "all
    else"."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for item in published_values(task):
        values.setdefault(item.variant, {}).setdefault(item.metric, {})[item.workers] = item.value
    for variant, metrics in values.items():
        phases = {name: metrics[metric] for metric, name in PHASES.items() if metric in metrics}
        if list(phases) == ["communication"] and "seconds" in metrics:
            spent = phases["communication"]
            phases["all else"] = {k: total - spent[k] for k, total in metrics["seconds"].items() if k in spent}
        rows: list[dict[str, Any]] = [
            {"series": name, "x": counted(k, "worker"), "y": seconds}
            for name, points in phases.items()
            for k, seconds in sorted(points.items())
        ]
        if rows:
            yield variant, rows
