"""Tests of mlbench (CONTRIBUTING.md says what a test is)."""

import os
from collections.abc import Iterable
from typing import Any

# Nightly, property tests get new inputs and long lists of cases are tried whole.
NIGHTLY = os.environ.get("MLBENCH_TEST_INPUTS") == "new"
# How often the tests of cut connections run, each time with other cuts, for a figure.
CUT_RUNS = int(os.environ.get("MLBENCH_TEST_CUTS", "0"))


def slow(cases: Iterable[Any]) -> list[Any]:
    """Further cases of a test, which make test leaves out."""
    import pytest  # not at the top: launchers of ranks import this package in a Python without packages

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
