"""When faults come: their times count from the first update of a run, however often its ranks start again."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlbench_cli.agent.faults import FaultControl


def test_faults_count_from_the_first_update_of_the_run_and_not_of_an_attempt(tmp_path: Path) -> None:
    agent: Any = SimpleNamespace(
        folder=str(tmp_path), node=0, count=1, state={"ended": None}, ranks=[], set_port=lambda port: None
    )
    plan = {"script": "at 60s kill rank 0", "seed": 1, "ranks": 1, "workers": 1, "policy": "restart"}
    control = FaultControl(agent, {**plan, "checkpoint_every": "60s", "detect_seconds": None, "from_start": False})
    folder, first = Path(control.folder), time.monotonic()

    def train(attempt: int, began: float) -> float:
        (folder / f"training-{attempt}-0").touch()
        (folder / "clock-0.json").write_text(json.dumps({"monotonic": began}))
        control.on_time(time.monotonic())
        document = json.loads((tmp_path / "faults.json").read_bytes())
        assert document["attempts"][attempt]["training"] is not None
        return float(document["zero"])

    control.begin()
    try:
        zero = train(0, first)
        control.take(0, {"do": "failed", "rank": 0, "code": 1, "why": "failed", "is_final": False})
        while len(control.document["attempts"]) < 2:
            control.on_time(time.monotonic())
        assert train(1, first + 30) == zero
    finally:
        control.finish()
