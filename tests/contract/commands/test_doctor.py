"""`mlbench doctor`: what it reports of this machine."""

import json
import tomllib
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace

import pytest

from mlbench_cli.app import run
from tests.documentation import ROOT


@pytest.mark.usefixtures("quick_torch")
def test_versions_whose_support_ends_soon_are_named_with_their_last_day(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the versions that this mlbench pins, on days before and after the first of them ends."""
    support = tomllib.loads((ROOT / "providers" / "pins.toml").read_text("utf-8"))["support"]
    ends = {f"{group} {version}": day for group, days in support.items() for version, day in days.items()}
    first = min(ends.values())

    def find_versions(day: date) -> dict[str, str]:
        noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
        monkeypatch.setattr("providers.pins.datetime", SimpleNamespace(now=noon.astimezone))
        assert run(["doctor", "-o", "json"]) == 0
        found = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        versions: dict[str, str] = found["versions"]
        return versions

    early, late = (find_versions(first + timedelta(days=days)) for days in (-90, -30))
    assert early["state"] == "ok"
    assert not any(name in early["found"] for name in ends)
    assert late["state"] == "old"
    assert "Update mlbench" in late["hint"]
    ending = {name for name, day in ends.items() if day <= first + timedelta(days=30)}
    assert ending != ends.keys()
    assert {name for name, day in ends.items() if f"{name} ({day})" in late["found"]} == ending
