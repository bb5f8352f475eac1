"""What belongs into a wheel and a source distribution. `make dist` checks real ones with the same function."""

import pytest

from tools.check_dist import expected_files, find_problems


@pytest.mark.parametrize(
    "name",
    [
        *(f"{package}/py.typed" for package in ("mlbench_cli", "providers", "templates", "task_images")),
        "providers/pins.toml",
        "mlbench_cli/results/analysis/published_results.csv",
        "mlbench_cli/server/pages/dashboard.js",
        "mlbench_cli/server/pages/run.html.j2",
        "mlbench_cli/results/figures/figures.css",
        "templates/kubernetes/start.sh",
        "providers/eks/cluster.yaml",
        "task_images/catalog.json",
    ],
)
def test_files_that_the_program_reads_are_expected(name: str) -> None:
    assert name in expected_files()


def test_missing_and_foreign_files_are_problems() -> None:
    assert find_problems({"a", "LICENSE"}, ["a"], ["LICENSE"]) == []
    assert find_problems({"a"}, ["a", "b"], ["LICENSE"]) == ["LICENSE is missing", "b is missing"]
    assert find_problems({"a", "tests/test_a.py"}, ["a"], []) == ["tests/test_a.py does not belong in it"]
