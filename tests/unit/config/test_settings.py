"""Where mlbench keeps its files, and how long it waits for the store and for clusters."""

import os
from pathlib import Path

import pytest

from mlbench_cli.config import settings
from mlbench_cli.errors import UsageError

PATIENCE = "MLBENCH_STORE_PATIENCE"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PATIENCE, settings.UNREACHABLE_VARIABLE):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back


def test_mlbench_home_holds_both_folders_and_only_the_data_directory_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "deep" / "home"
    monkeypatch.setenv("MLBENCH_HOME", str(home))
    assert settings.config_dir() == home
    assert not home.exists()
    assert settings.data_dir() == home
    assert home.stat().st_mode & 0o777 == 0o700
    assert settings.data_dir() == home  # it may exist already


def test_a_relative_home_and_one_with_a_tilde_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given, found in (("~/own", "own"), ("here", "here")):
        monkeypatch.setenv("MLBENCH_HOME", given)
        assert settings.config_dir() == tmp_path / found
        assert settings.data_dir() == tmp_path / found


def test_without_mlbench_home_the_folders_are_those_of_the_xdg_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("MLBENCH_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert settings.data_dir() == tmp_path / "data" / "mlbench"
    assert settings.config_dir() == tmp_path / "config" / "mlbench"


def test_a_home_below_a_file_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(UsageError, match=r"file/home cannot be created: Not a directory\.") as caught:
        settings.data_dir()
    assert caught.value.hint is not None
    assert "MLBENCH_HOME" in caught.value.hint


def test_a_home_that_is_not_utf_8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with pytest.raises(UsageError, match="not UTF-8"):
        settings.data_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 30.0), ("0", 0.0), ("0.5", 0.5), ("1", 1.0), ("3600", 3600.0), ("3.6e3", 3600.0)]
)
def test_patience_with_a_locked_store(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, text)
    assert settings.store_patience() == seconds


@pytest.mark.parametrize("text", ["-0.1", "-1", "3600.1", "inf", "nan", "5m", "soon"])
def test_patience_that_is_no_time_up_to_an_hour_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, text)
    with pytest.raises(UsageError, match=f'"{text}", not a number of seconds from 0 to 3600'):
        settings.store_patience()


def test_of_a_long_wrong_patience_the_first_40_characters_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, "x" * 41)
    with pytest.raises(UsageError, match=f'"{"x" * 40}"'):
        settings.store_patience()


def test_an_unreachable_cluster_is_given_up_after_15_minutes_or_the_time_of_the_option() -> None:
    assert settings.unreachable_timeout() == 15 * 60
    settings.set_unreachable_timeout(None)
    assert settings.unreachable_timeout() == 15 * 60
    settings.set_unreachable_timeout("2h")
    assert settings.unreachable_timeout() == 7200
    assert os.environ[settings.UNREACHABLE_VARIABLE] == "2h"  # for the processes that start queued runs


def test_a_wrong_timeout_is_refused_under_the_name_of_where_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--unreachable-timeout"):
        settings.set_unreachable_timeout("soon")
    assert settings.unreachable_timeout() == 15 * 60
    monkeypatch.setenv(settings.UNREACHABLE_VARIABLE, "soon")
    with pytest.raises(UsageError, match=settings.UNREACHABLE_VARIABLE):
        settings.unreachable_timeout()
