"""Pinned versions: one file, the user's own first, and a warning before support ends."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.errors import UsageError
from providers.pins import SHIPPED, find_pin, list_pins, pinned_versions, user_pin_file


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))


def test_what_is_pinned_has_its_version_and_the_end_of_its_support() -> None:
    (pin,) = [pin for pin in list_pins() if (pin.group, pin.kubernetes, pin.part) == ("eks", "1.36", "vpc-cni")]
    assert pin.version.startswith("v1.22.4")
    assert pin.ends == date(2027, 8, 2)
    assert pin.ends_soon(date(2027, 6, 3))
    assert not pin.ends_soon(date(2027, 8, 2) - timedelta(days=61))
    assert find_pin("eks", "vpc-cni", "1.99") is None


def test_images_are_pinned_by_digest_or_version() -> None:
    for pin in list_pins():
        assert "latest" not in pin.version
        if pin.group in ("kind", "gke"):
            assert len(pin.version.rpartition("@sha256:")[2]) == 64


def test_own_pins_go_first_and_add_versions() -> None:
    user_pin_file().write_text(
        '[support.eks]\n"1.37" = 2027-12-02\n[eks."1.37"]\nvpc-cni = "v9"\n[eks."1.35"]\ncoredns = "v8"\n'
    )
    assert find_pin("eks", "vpc-cni", "1.37") == "v9"
    assert find_pin("eks", "coredns", "1.35") == "v8"
    assert find_pin("eks", "kube-proxy", "1.35") == "v1.35.3-eksbuild.29"
    assert pinned_versions("eks") == ["1.35", "1.36", "1.37"]
    own = {(pin.kubernetes, pin.part): pin.ends for pin in list_pins() if pin.is_own}
    assert own == {("1.37", "vpc-cni"): date(2027, 12, 2), ("1.35", "coredns"): date(2027, 3, 27)}


@pytest.mark.parametrize(
    "text", ["[eks", '[eks."1.34"]\ncoredns = 1', "eks = 1", '[support.eks]\n"1.34" = "soon"', "\x00"]
)
def test_a_malformed_file_is_named(text: str) -> None:
    user_pin_file().write_text(text)
    with pytest.raises(UsageError, match=r"pins\.toml") as caught:
        list_pins()
    assert str(SHIPPED) in str(caught.value.hint)


def test_the_check_fails_60_days_before_the_end_of_a_support(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pins", "--check"]) in (0, 7)  # by the calendar
    ends = datetime.now(UTC).date() + timedelta(days=59)
    user_pin_file().write_text(f'[support.eks]\n"1.36" = {ends}\n')
    capsys.readouterr()
    assert run(["pins", "--check"]) == 7
    told = capsys.readouterr().err
    assert f"eks 1.36 on {ends}" in told
    assert str(user_pin_file()) in told
