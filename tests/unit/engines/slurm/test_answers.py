"""What Slurm's commands answer, in its own texts: refusals by exit code, job numbers, nodes that can run a job."""

import pytest

from mlbench_cli.engines.slurm.controller import Answer, explain_refusal, find_number, parse_jobs, parse_partitions
from mlbench_cli.engines.slurm.discovery import parse_nodes

FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            5,
            "sbatch: error: AssocMaxSubmitJobLimit\n"
            + FAILED
            + "Job violates accounting/QOS policy (job submit limit)",
        ),
        (5, "sbatch: error: QOSMaxWallDurationPerJobLimit\n" + FAILED + "Job violates accounting/QOS policy"),
        (5, FAILED + "Requested partition configuration not available now"),
        (5, FAILED + "Node count specification invalid"),
        (5, FAILED + "a text that no version of Slurm has yet"),
        (5, ""),
        (3, FAILED + "User's group not permitted to use this partition"),
        (3, FAILED + "Invalid account or account/partition combination specified"),
        (3, FAILED + "Invalid qos specification"),
        (2, FAILED + "Requested time limit is invalid (missing or exceeds some limit)"),
        (2, "sbatch: error: invalid partition specified: fast\n" + FAILED + "Invalid partition name specified"),
        (10, FAILED + "Zero Bytes were transmitted or received"),
        (10, "sbatch: fatal: Could not establish a configuration source"),
        (3, FAILED + "Reservation access denied"),
        (
            10,
            "sbatch: error: Slurm controller not responding, sleeping and retrying.\n"
            + FAILED
            + "Resource temporarily",
        ),
        (
            10,
            'sbatch: error: Munge encode failed: Failed to access "socket"\n'
            + FAILED
            + "Protocol authentication error",
        ),
    ],
)
def test_a_refusal_has_the_exit_code_of_its_cause(code: int, text: str) -> None:
    error = explain_refusal(Answer(1, "", text))
    assert error.exit_code == code
    assert not error.message.endswith(": ")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("519605\n", "519605"),
        ("--> Verifying valid submit host ...OK\n519605;cluster1\n", "519605"),
        ("12\nYour job will be charged 3 hours\n", "12"),
        ("Submitted batch job 12 on cluster b\n", "12"),  # of a wrapper that drops --parsable
        ("2 checks passed\n", None),
        ("", None),
    ],
)
def test_the_number_of_a_job_is_found_among_the_lines_of_a_site(text: str, number: str | None) -> None:
    assert find_number(text) == number


def test_only_nodes_that_can_run_a_job_now_are_counted() -> None:
    lines = "1|drained|n3|a\n2|idle|n[1-2]|a,b\n8|idle~|dy[1-8]|a\n1|idle$|n4|a\n1|planned|n5|a\n"
    lines += "1|idle*|n6|a\n1|idle|n7|c\n"
    found = parse_nodes(lines)
    assert (found.idle, found.not_idle) == (3, "n3,dy[1-8],n4,n5,n6")
    assert "8 are powered down" in found.phrase
    assert "1 is not responding" in found.phrase
    assert "idle" not in parse_nodes("1|idle-|n1|\n2|idle@|n2|\n1|idle~*|n3|\n").phrase
    assert parse_nodes(lines, "a&b").idle == 2
    assert parse_nodes(lines, "b|c").idle == 3
    assert parse_nodes(lines, "[rack1*2&rack2*2]").idle == 0
    assert parse_nodes("\u00b2|idle|n1|a\n").idle == 0


def test_odd_lines_of_slurm_are_skipped() -> None:
    assert parse_jobs("7| |1|2|n1|None\n\u00b2|RUNNING|1|2|n1|None\n8|RUNNING|1|N/A|n1|None\n").keys() == {"8"}
    assert parse_partitions("all|infinite|\u00b2|(null)|all*\n") == {}
