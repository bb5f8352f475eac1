"""Every trouble that can be provoked on a real cluster is called by its name, and nothing else is."""

from pathlib import Path

import pytest

from tests.e2e.runs import Runs
from tests.e2e.troubles import TROUBLES, WANTS_DOCKER, nodes_can_be_paused, provoke

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_is_named(runs: Runs, tmp_path: Path, name: str) -> None:
    trouble = TROUBLES[name]
    if name in WANTS_DOCKER:
        with runs.cluster.access.client() as api:
            if not nodes_can_be_paused(api):
                pytest.skip("the nodes are no containers of this machine's Docker")
    seen, printed = provoke(trouble, name, runs, tmp_path)
    assert [finding.code for finding in seen.findings] == [trouble.code]
    assert list(printed) == [*dict(trouble.before), trouble.code]
