"""The report on a fabric as tables and as a page, in the ten sections of the IETF draft's reporting form."""

from mlbench_cli.results.analysis.fabric import DRAFT, FabricReport
from mlbench_cli.results.analysis.numbers import NO_VALUE, SECONDS, format_percent, format_value
from mlbench_cli.results.report.model import Report, ReportTable, Section

PERCENTILES = ("mean", "p50", "p95", "p99")


def fabric_tables(report: FabricReport) -> list[ReportTable]:
    """The tables of what was measured: trainings, links that were changed, collectives."""
    tables = (_job_table(report), _link_table(report), _collective_table(report))
    return [table for table in tables if table.rows]


def make_fabric_page(report: FabricReport) -> Report:
    """The page of a report."""
    document = report.to_dict()
    fairness = () if report.fairness is None else (f"Fairness (Jain's index): {report.fairness:.3f}.",)
    texts = {
        "Device under test": (document["dut"],),
        "Topology": (document["topology"],),
        "Configuration": tuple(document["configuration"]) or ("See the results.",),
        "Observation points": (document["observation_points"],),
        "Hosts": tuple(document["hosts"]),
        "Results": fairness,
        "Anomalies": tuple(document["anomalies"]) or ("None.",),
        "Trials": (f"{document['trials']['counted']} counted, {document['trials']['excluded']} left out.",),
        "Repeatability": (document["repeatability"],),
        "Comparability": (document["comparability"],),
    }
    sections = (
        Section(f"{number}. {heading}", text, tuple(fabric_tables(report)) if heading == "Results" else ())
        for number, (heading, text) in enumerate(texts.items(), 1)
    )
    headline = (f"In the reporting form of {DRAFT}, observed at the endpoints.",)
    return Report("Fabric", headline, (), tuple(sections), runs=tuple(sorted(_runs(report))))


def _runs(report: FabricReport) -> set[str]:
    return {job.run for job in report.jobs} | {str(row["run"]) for row in report.collectives}


def _job_table(report: FabricReport) -> ReportTable:
    head = (
        "run",
        "method",
        "ranks",
        "update",
        "compute",
        "roofline",
        "JCT ratio",
        "overlap",
        "by spans",
        "interference",
    )
    rows = []
    for job in report.jobs:
        times = (job.seconds, job.compute_seconds, job.roofline_seconds)
        shares = (job.overlap, job.spans_overlap)
        rows.append(
            (
                *(job.run, job.method, str(job.ranks)),
                *(format_value(value, SECONDS) for value in times),
                format_value(job.jct_ratio),
                *(NO_VALUE if share is None else format_percent(share) for share in shares),
                format_value(job.interference),
            )
        )
    return ReportTable("Trainings", head, tuple(rows), numeric=tuple(range(2, len(head))))


def _link_table(report: FabricReport) -> ReportTable:
    head = ("run", "link", "at", "for", "gap", "recovery")
    rows = tuple(
        (
            link.run,
            str(link.worker),
            *(format_value(one, SECONDS) for one in (link.at, link.down, link.gap, link.recovery)),
        )
        for link in report.links
    )
    return ReportTable("Links that were changed", head, rows, numeric=tuple(range(1, len(head))))


def _collective_table(report: FabricReport) -> ReportTable:
    names = ("run", "collective", "dtype", "bytes", "samples")
    head = (*("run", "collective", "type", "bytes", "samples"), *(f"GB/s at {name}" for name in PERCENTILES))
    rows = tuple(
        (
            *(str(row[name]) for name in names),
            *(format_value(row[f"busbw_at_{name}_time"]) for name in PERCENTILES),
        )
        for row in report.collectives
    )
    return ReportTable("Collectives", head, rows, numeric=tuple(range(3, len(head))))
