"""Tests of mlbench (CONTRIBUTING.md says what a test is)."""

import os

# Nightly, property tests get new inputs and long lists of cases are tried whole.
NIGHTLY = os.environ.get("MLBENCH_TEST_INPUTS") == "new"
