"""The config file and the environment: precedence, and bad files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.app import run
from mlbench_cli.config import file as config
from mlbench_cli.config.file import SETTINGS
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(home: Path, text: str) -> None:
    (home / "config.toml").write_text(text)


# --- where a value comes from ----------------------------------------------------------------------------------------


def test_the_environment_comes_before_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.find_default("timeout") is None
    write(home, '# mine\n\ntimeout = "2h"\n')
    default = config.find_default("timeout")
    assert default is not None
    assert (default.value, default.source, default.origin) == ("2h", "config", f"{home}/config.toml, line 3")
    monkeypatch.setenv("MLBENCH_TIMEOUT", "5m")
    default = config.find_default("timeout")
    assert default is not None
    assert (default.value, default.source, default.origin) == ("5m", "environment", "MLBENCH_TIMEOUT")
    monkeypatch.setenv("MLBENCH_TIMEOUT", "")
    default = config.find_default("timeout")
    assert default is not None
    assert default.value == "2h"


def spec_of(capsys: Captured, *argv: str) -> dict[str, object]:
    """What a local run would be started with."""
    assert run(["run", "x", "1", "--command", "true", "--dry-run", "-o", "json", *argv]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)["submissions"][0]["documents"][0]
    return document


def test_a_run_takes_flag_then_file_then_environment_then_config(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert spec_of(capsys)["timeout"] == 4 * 3600
    write(home, 'timeout = "4m"\n')
    assert spec_of(capsys)["timeout"] == 240
    monkeypatch.setenv("MLBENCH_TIMEOUT", "3m")
    assert spec_of(capsys)["timeout"] == 180
    (home / "spec.yaml").write_text("timeout: 2m\n")
    assert spec_of(capsys, "-f", "spec.yaml")["timeout"] == 120
    assert spec_of(capsys, "-f", "spec.yaml", "--timeout", "1m")["timeout"] == 60


def test_registry_and_namespace_are_for_clusters_without_their_own(home: Path, capsys: Captured) -> None:
    write(home, 'registry = "ghcr.io/me"\nnamespace = "bench"\n')
    store = Store(home)
    store.record_cluster(Cluster("plain", "kind"))
    store.record_cluster(Cluster("own", "kind", details={"registry": "localhost:5001", "namespace": "theirs"}))
    argv = ["run", "x", "1", "--task", "digits_resnet", "--dry-run"]
    assert run([*argv, "--cluster", "plain"]) == 0
    printed = capsys.readouterr().out
    assert "ghcr.io/me/digits_resnet" in printed
    assert "namespace: bench" in printed
    assert run([*argv, "--cluster", "own"]) == 0
    printed = capsys.readouterr().out
    assert "localhost:5001/digits_resnet" in printed
    assert "namespace: bench" not in printed
    assert run([*argv, "--cluster", "local"]) == 0  # they mean nothing there, and are no reason to refuse


def test_a_variable_limits_the_cluster_to_a_shell(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    Store(home).record_cluster(Cluster("far", "kind"))
    assert run(["set-cluster", "far"]) == 0
    monkeypatch.setenv("MLBENCH_CLUSTER", "local")
    capsys.readouterr()
    assert run(["list-clusters", "-o", "json"]) == 0
    clusters = json.loads(capsys.readouterr().out)["clusters"]
    assert {cluster["name"]: cluster["current"] for cluster in clusters} == {"local": True, "far": False}
    assert run(["set-cluster", "far"]) == 0
    assert "Commands keep using local: MLBENCH_CLUSTER takes precedence" in capsys.readouterr().err
    monkeypatch.setenv("MLBENCH_CLUSTER", "fra")
    assert run(["run", "x", "1", "--command", "true"]) == 4
    assert 'MLBENCH_CLUSTER: There is no cluster "fra". Did you mean "far"?' in capsys.readouterr().err


@pytest.mark.parametrize("provider", ["slurm", "hosts"])
def test_registry_and_namespace_are_not_for_machines_without_kubernetes(
    provider: str, home: Path, capsys: Captured
) -> None:
    write(home, 'registry = "ghcr.io/me"\nnamespace = "bench"\n')
    host = {"name": "m1", "login": "m1", "slots": 1, "address": "127.0.0.1", "interface": None}
    Store(home).record_cluster(Cluster("lab", provider, details={"folder": "/shared", "hosts": [host]}))
    argv = ["run", "x", "1", "--command", "true", "--cluster", "lab", "--dry-run"]
    assert run(argv) == 0, capsys.readouterr().err
    assert run([*argv, "--registry", "ghcr.io/me"]) == 2
    assert f"--registry does not apply on {provider}" in capsys.readouterr().err


def test_a_data_folder_that_is_not_there(home: Path, capsys: Captured) -> None:
    write(home, f'data-dir = "{home}/sets"\n')
    assert run(["run", "x", "1", "--command", "true"]) == 4
    assert f"config.toml, line 1: the folder {home}/sets does not exist." in capsys.readouterr().err
    (home / "sets").mkdir()
    assert "data_dir" in str(spec_of(capsys)).lower()


# --- what is said of them --------------------------------------------------------------------------------------------


def test_help_shows_where_each_value_comes_from(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    write(home, 'namespace = "bench"\n')
    monkeypatch.setenv("MLBENCH_REGISTRY", "ghcr.io/me")
    assert run(["help", "defaults"]) == 0
    out = capsys.readouterr().out
    assert "config.toml, line 1" in " ".join(out.split())
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()[:1] and line.split()[0] in SETTINGS}
    assert list(rows) == list(SETTINGS)
    assert "ghcr.io/me" in rows["registry"]
    assert "MLBENCH_REGISTRY" in rows["registry"]
    assert "built in" in rows["timeout"]
    assert f"Config file: {home}/config.toml\n" in out


# --- bad files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('clutser = "x"', 1, 'unknown key "clutser". Did you mean "cluster"?'),
        ("\ntimeout = true", 2, '"timeout" is a boolean, not a text.'),
        ("timeout = 1.5", 1, '"timeout" is a number, not a text.'),
        ("timeout = -1", 1, '"timeout" is a number, not a text.'),
        ("timeout = 0", 1, '"0" must be above 0.'),
        ("cluster = 7", 1, '"cluster" is a number, not a text.'),
        ("cluster = [1]", 1, '"cluster" is a list, not a text.'),
        ("[cluster]", 1, '"cluster" is a table, not a text.'),
        ("namespace = 2026-01-01", 1, '"namespace" is a date or time, not a text.'),
        ('data-dir = "sets"', 1, "is not an absolute path"),
        ('data-dir = "/a"\ndata_dir = "/b"', 2, "given twice"),
        ('registry = "my registry"', 1, "is not an image prefix"),
        ('timeout = "soon"', 1, "is not a duration"),
        ('namespace = ""', 1, "is not a name"),
        ('timeout = "1h', None, "not valid TOML"),
        ("\x00", None, "not valid TOML"),
        ("a." * 5000 + "b = 1", None, ""),
    ],
)
def test_bad_files(home: Path, text: str, line: int | None, words: str, capsys: Captured) -> None:
    write(home, text)
    for argv in (["help", "defaults"], ["run", "x", "1", "--command", "true"]):
        assert run(argv) == 2
        err = capsys.readouterr().err
        assert words in err
        assert "\nNext: " in err
        assert line is None or f"config.toml, line {line}: " in err
    assert (home / "config.toml").read_text() == text
    assert run(["status"]) == 0  # needs no default


def test_a_file_that_is_not_text(home: Path, capsys: Captured) -> None:
    (home / "config.toml").write_bytes(b"timeout = \xff")
    assert run(["help", "defaults"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
    (home / "config.toml").unlink()
    (home / "config.toml").mkdir()
    assert run(["help", "defaults"]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


def parse(text: str) -> dict[str, config.Default] | UsageError:
    try:
        return config.parse_config(text, Path("config.toml"))
    except UsageError as error:
        return error


@pytest.mark.slow
@given(st.text())
def test_any_text_is_settings_or_a_usage_error(text: str) -> None:
    found = parse(text)
    assert found.hint if isinstance(found, UsageError) else set(found) <= set(SETTINGS)


values = st.one_of(st.text(), st.integers(), st.booleans(), st.floats(), st.lists(st.integers(), max_size=2))


@given(st.dictionaries(st.sampled_from([*SETTINGS, "data_dir", "tiemout"]), values, max_size=3))
def test_any_values_are_settings_or_a_usage_error(data: dict[str, object]) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    found = parse("\n".join(lines))
    assert found.hint if isinstance(found, UsageError) else all(item.value.strip() for item in found.values())
