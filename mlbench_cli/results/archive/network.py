"""network.json: the network between the ranks, from the probes in the logs, or from the engine that shaped it.

The evidence is either the `network` events of rank 0 (a probe before the task and one after it; on a cluster with a
shaped network, an event of the stage "setup" before them), or shaping.json, which the local engine writes if it
emulated the network (`--network`) and probed it before the ranks started and after they ended. Values are untrusted:
malformed ones are omitted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.network import MODELED, NOT_SHAPED, find_deviations, is_modeled, parse_network
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import NetworkDocument, ProbeDocument, SummaryDocument, TrafficDocument
from mlbench_cli.util.json_text import make_strict
from mlbench_cli.util.text import one_line

MAX_LINKS = 64
SETUP = "setup"
MIN_COUNTED = 0.95  # share of the bytes that the ranks must have sent; if less was counted, some took another route
_LINK_FIGURES = (
    *("rtt_p50_seconds", "rtt_p90_seconds", "alone_bits_per_second", "together_bits_per_second"),
    *("first_bits_per_second", "first_bytes"),
)
_COUNTERS = (*("rx_bytes", "rx_packets", "rx_dropped", "tx_bytes", "tx_packets", "tx_dropped", "retransmits"),)


def network_document(
    asked: str | None,
    events: Iterable[Mapping[str, Any]],
    shaping: Mapping[str, Any] | None,
    least_sent: float | None = None,
) -> NetworkDocument | None:
    """network.json without its schema version; None if nothing was requested or measured.

    `least_sent`: bytes that a rank must have sent to others according to its method; None: unknown.
    """
    reports = _rows(list(events) if shaping is None else shaping.get("probes"))
    probes = [parse_probe(report) for report in reports if report.get("stage") != SETUP]
    if asked is None and not probes:
        return None
    shaping = shaping or next((report["setup"] for report in reports if _is_setup(report)), None)
    method = _method(asked, shaping)
    setup = (
        make_strict({key: value for key, value in shaping.items() if key != "probes"}) if shaping is not None else None
    )
    problems = _problems(asked, method, probes, setup)
    if asked is not None and method != MODELED:
        problems += _find_detour(least_sent, setup, _traffic(probes))
    document: NetworkDocument = {
        "asked": asked,
        "method": method,
        "probes": probes,
        "traffic": _traffic(probes),
        "summary": _summary(asked, method, probes, problems),
    }
    if setup is not None:
        document["setup"] = setup
    return document


def _is_setup(report: Mapping[str, Any]) -> bool:
    return report.get("stage") == SETUP and isinstance(report.get("setup"), Mapping)


def parse_probe(report: Mapping[str, Any]) -> ProbeDocument:
    """A probe's report with every field present and valid."""
    links = report.get("links")
    counters = report.get("counters")
    error = report.get("error")
    drained = _numbers(report, ("drained_bytes", "drained_bits_per_second"))
    probe: ProbeDocument = {
        "stage": "after" if report.get("stage") == "after" else "before",
        "form": one_line(report["form"], 20) if isinstance(report.get("form"), str) else None,
        "ranks": _count(report.get("ranks")),
        "networks": _count(report.get("networks")),
        "links": [_numbers(link, ("from", "to", *_LINK_FIGURES)) for link in _rows(links)],
        "counters": [
            {"interface": one_line(str(row.get("interface")), 20), **_numbers(row, _COUNTERS)}
            for row in _rows(counters)
        ],
        "seconds": report["seconds"] if _is_amount(report.get("seconds")) else None,
        "error": one_line(str(error)) if error else None,
    }
    return cast(ProbeDocument, {**probe, **drained})


def _method(asked: str | None, shaping: Mapping[str, Any] | None) -> str:
    if asked is not None and is_modeled(asked):
        return MODELED
    method = (shaping or {}).get("method")
    return one_line(method, 40) if isinstance(method, str) and method else NOT_SHAPED


def _problems(
    asked: str | None, method: str, probes: Sequence[ProbeDocument], setup: Mapping[str, Any] | None
) -> list[str]:
    """Why a shaped network differs from the request; of several probes of a stage, one must fit."""
    if asked is None or method == MODELED:
        return []
    if not probes:
        return ["it was not measured"]
    shape = parse_network(asked)
    found = []
    for stage in dict.fromkeys(probe["stage"] for probe in probes):
        each = [find_deviations(shape, probe) for probe in probes if probe["stage"] == stage]
        found += [f"{problem} ({stage} the task)" for problem in (each[-1] if all(each) else ())]
    noted = (setup or {}).get("problems")
    return found + [one_line(str(problem)) for problem in noted[:8]] if isinstance(noted, list) else found


def find_least_sent(spec: RunSpec, details: Mapping[str, Any]) -> float | None:
    """Bytes that rank 0 must have sent to other workers according to its method's counters; None if unknown.

    At least the other ranks' shares of a message leave a rank, as in a reduce-scatter. Ranks of one worker share a
    link.
    """
    communication = details.get("communication")
    count = communication.get("bytes") if isinstance(communication, Mapping) else None
    if spec.processes_per_worker > 1 or not is_finite_number(count):
        return None
    return float(count) * (spec.world_size - 1) / spec.world_size


def _find_detour(
    least_sent: float | None, setup: Mapping[str, Any] | None, traffic: TrafficDocument | None
) -> list[str]:
    """Whether the ranks' data bypassed the shaped links, through shared memory or another interface."""
    task = (setup or {}).get("task")
    by_switch: Any = task.get("sent_bytes") if isinstance(task, Mapping) else None
    counted = [value for value in by_switch if _is_amount(value)] if _is_list(by_switch) else []
    if not counted and traffic is not None:
        counted = [traffic["max_sent_bytes"]]
    if least_sent is None or not counted or max(counted) >= MIN_COUNTED * least_sent:
        return []
    return [f"its links counted {max(counted) / 1e6:.1f} MB, but the ranks sent {least_sent / 1e6:.1f} MB or more"]


def _summary(asked: str | None, method: str, probes: Sequence[ProbeDocument], problems: list[str]) -> SummaryDocument:
    before = next((probe for probe in probes if probe["stage"] == "before" and probe["links"]), None)
    links = before["links"] if before else []
    trips = sorted(link["rtt_p50_seconds"] for link in links if "rtt_p50_seconds" in link)
    lowest = {
        key: min((link[key] for link in links if key in link), default=None)
        for key in ("alone_bits_per_second", "together_bits_per_second", "first_bits_per_second")
    }
    return {
        "asked": asked,
        "method": method,
        "networks": before["networks"] if before else None,
        "rtt_seconds": trips[len(trips) // 2] if trips else None,
        "alone_bits_per_second": lowest["alone_bits_per_second"],
        "together_bits_per_second": lowest["together_bits_per_second"],
        "first_bits_per_second": lowest["first_bits_per_second"],
        "held": None if asked is None or method == MODELED else not problems,
        "problems": problems,
    }


def _traffic(probes: Sequence[ProbeDocument]) -> TrafficDocument | None:
    """The difference of the counters between the probe before the task and the first one after it; None if ranks share
    an interface."""
    after = next((probe for probe in probes[1:] if probe["stage"] == "after"), None)
    if after is None or probes[0]["networks"] < 2 or len(probes[0]["counters"]) != len(after["counters"]):
        return None
    pairs = list(zip(probes[0]["counters"], after["counters"], strict=True))

    def growth(key: str) -> list[int]:
        return [max(0, int(after.get(key, 0)) - int(before.get(key, 0))) for before, after in pairs]

    if not pairs:
        return None
    return {
        "max_sent_bytes": max(growth("tx_bytes")),
        "max_received_bytes": max(growth("rx_bytes")),
        "dropped_packets": sum(growth("tx_dropped")) + sum(growth("rx_dropped")),
        "retransmitted_segments": sum(growth("retransmits")),
    }


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value[:MAX_LINKS] if isinstance(row, Mapping)] if _is_list(value) else []


def _numbers(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    return {name: row[name] for name in names if _is_amount(row.get(name))}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _count(value: Any) -> int:
    return value if _is_amount(value) and isinstance(value, int) else 0


def _is_amount(value: Any) -> bool:
    return is_finite_number(value) and value >= 0
