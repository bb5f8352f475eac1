"""Honest runs of documented features, sealed and judged: none of them is doubted."""

import json
from pathlib import Path

import pytest

from mlbench_cli.app import run

FEATURES = """
name: features
task: digits_resnet
preset: tiny
workers: 2
share-machine: true
runs:
  - {name: plain}
  - {name: budget, set: {run.budget: 3s}}
  - {name: restart, faults: every ~5s kill rank 1, on-failure: restart, set: {epochs: 2}}
  - {name: method, method: powersgd}
  - {name: model, network: "model:1gbit,5ms"}
  - {name: anonymous, anonymous: true}
  - {name: servers, method: bsp-ps, set: {run.servers: 1}}
  - {name: pinned, set: {run.pin: true}}
  - {name: held, set: {hold_out: 0.2}}
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_ranks")
def test_no_feature_makes_an_honest_run_doubted(home: Path) -> None:
    Path("features.yaml").write_text(FEATURES)
    run(["run", "-f", "features.yaml", "--yes"])
    folders = sorted((home / "runs").glob("*/result.json"))
    assert len(folders) == 9
    for path in folders:
        result = json.loads(path.read_bytes())
        assert "doubts" not in result, (path.with_name("run.json").read_text()[:200], result["doubts"])
    assert run(["verify", "features"]) == 0
