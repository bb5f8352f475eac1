"""What Slurm's commands answer, in its own texts: refusals by exit code, job numbers, nodes that can run a job."""

import pytest

from mlbench_cli.engines.slurm.controller import find_number, parse_jobs, parse_partitions


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


def test_odd_lines_of_slurm_are_skipped() -> None:
    assert parse_jobs("7| |1|2|n1|None\n\u00b2|RUNNING|1|2|n1|None\n8|RUNNING|1|N/A|n1|None\n").keys() == {"8"}
    assert parse_partitions("all|infinite|\u00b2|(null)|all*\n") == {}
