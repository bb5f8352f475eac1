"""The config file and the environment: precedence, changes that keep what a person wrote, and bad files."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlbench_cli.app import run
from mlbench_cli.config import file as config
from mlbench_cli.config.file import SETTINGS
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store

Captured = pytest.CaptureFixture[str]
GOOD = {"cluster": "gke-4", "data-dir": "/data", "registry": "ghcr.io/me", "namespace": "bench", "timeout": "2h"}


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


# --- the command -----------------------------------------------------------------------------------------------------


def test_config_shows_where_each_value_comes_from(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    write(home, 'namespace = "bench"\n')
    monkeypatch.setenv("MLBENCH_REGISTRY", "ghcr.io/me")
    assert run(["config", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {key: entry["source"] for key, entry in document["settings"].items()} == {
        "cluster": "built-in",
        "data-dir": "built-in",
        "registry": "environment",
        "namespace": "config",
        "timeout": "built-in",
    }
    assert document["file"] == str(home / "config.toml")
    assert run(["config"]) == 0
    assert f"{home}/config.toml, line 1" in capsys.readouterr().out


def test_set_and_unset_keep_what_a_person_wrote(home: Path, capsys: Captured) -> None:
    write(home, '# my settings\n"timeout"="1h" # short\n\n# where\nnamespace = \'bench\'')
    assert run(["config", "set", "registry", "ghcr.io/me"]) == 0
    assert run(["config", "set", "timeout", "3h"]) == 0
    assert run(["config", "get", "timeout"]) == 0
    assert capsys.readouterr().out.endswith("\n3h\n")
    assert run(["config", "unset", "namespace"]) == 0
    assert run(["config", "unset", "namespace"]) == 0
    text = (home / "config.toml").read_text()
    assert text == '# my settings\ntimeout = "3h"\n\n# where\nregistry = "ghcr.io/me"\n'


def test_a_folder_is_written_as_an_absolute_path(home: Path, capsys: Captured) -> None:
    assert run(["config", "set", "data_dir", "sets"]) == 0
    assert run(["config", "get", "data-dir"]) == 0
    assert capsys.readouterr().out.endswith(f"\n{home}/sets\n")
    assert run(["config", "set", "data-dir", "~/sets"]) == 0
    assert 'data-dir = "~/sets"' in (home / "config.toml").read_text()
    default = config.find_default("data-dir")
    assert default is not None
    assert default.value == os.path.expanduser("~/sets")


def test_a_linked_file_stays_a_link(home: Path) -> None:
    (home / "dotfiles").mkdir()
    (home / "config.toml").symlink_to(home / "dotfiles" / "mlbench.toml")
    config.set_value("timeout", "1h")
    assert (home / "config.toml").is_symlink()
    assert (home / "dotfiles" / "mlbench.toml").read_text() == 'timeout = "1h"\n'


def test_a_line_that_only_looks_like_the_setting_is_not_replaced(home: Path) -> None:
    text = 'cluster = """\\\ntimeout = 1\\\n"""\ntimeout = "1h"\n'
    write(home, text)
    with pytest.raises(UsageError):
        config.set_value("timeout", "2h")
    assert (home / "config.toml").read_text() == text


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
    for argv in (["config"], ["run", "x", "1", "--command", "true"], ["config", "set", "timeout", "1h"]):
        assert run(argv) == 2
        err = capsys.readouterr().err
        assert words in err
        assert "\nNext: " in err
        assert line is None or f"config.toml, line {line}: " in err
    assert (home / "config.toml").read_text() == text
    assert run(["config", "path"]) == 0
    assert run(["status"]) == 0  # needs no default


def test_a_file_that_is_not_text(home: Path, capsys: Captured) -> None:
    (home / "config.toml").write_bytes(b"timeout = \xff")
    assert run(["config"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
    (home / "config.toml").unlink()
    (home / "config.toml").mkdir()
    assert run(["config"]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err


def parse(text: str) -> dict[str, config.Default] | UsageError:
    try:
        return config.parse_config(text, Path("config.toml"))
    except UsageError as error:
        return error


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(list(GOOD)), st.booleans()), max_size=8))
def test_any_order_of_changes_ends_with_the_last_values(home: Path, changes: list[tuple[str, bool]]) -> None:
    (home / "config.toml").unlink(missing_ok=True)
    wanted: dict[str, str] = {}
    for key, is_set in changes:
        if is_set:
            config.set_value(key, GOOD[key])
            wanted[key] = GOOD[key]
        else:
            assert config.unset_value(key) == (wanted.pop(key, None) is not None)
    assert {key: default.value for key, default in config.read_config().items()} == wanted
