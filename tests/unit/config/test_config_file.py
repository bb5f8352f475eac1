"""The config file by itself: each setting's form and limits, where a value was found, and what a change leaves."""

import os
from pathlib import Path

import pytest

from mlbench_cli.config import file as config
from mlbench_cli.config.file import MAX_VALUE, SETTINGS, Default, find_setting, parse_config, set_value, unset_value
from mlbench_cli.errors import NotFoundError, UsageError

PATH = Path("config.toml")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", "/home/me")
    return tmp_path / "home" / "config.toml"


def refuse(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse_config(text, PATH)
    return caught.value


def test_every_setting_has_a_variable() -> None:
    assert {key: setting.variable for key, setting in SETTINGS.items()} == {
        "cluster": "MLBENCH_CLUSTER",
        "data-dir": "MLBENCH_DATA_DIR",
        "registry": "MLBENCH_REGISTRY",
        "namespace": "MLBENCH_NAMESPACE",
        "timeout": "MLBENCH_TIMEOUT",
        "on-end": "MLBENCH_ON_END",
    }
    assert find_setting("data_dir") is find_setting("data-dir") is SETTINGS["data-dir"]


def test_an_unknown_setting_comes_with_the_nearest_one() -> None:
    with pytest.raises(NotFoundError) as caught:
        find_setting("data-dirs")
    assert caught.value.message == 'There is no setting "data-dirs". Did you mean "data-dir"?'
    assert caught.value.hint == "mlbench config"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ('cluster = "a"', "cluster", "a"),
        ('cluster = "gke-4.b"', "cluster", "gke-4.b"),
        (f'cluster = "{"a" * 63}"', "cluster", "a" * 63),
        ('registry = "ghcr.io/me"', "registry", "ghcr.io/me"),
        ('registry = "1.dkr.ecr.eu.amazonaws.com/a_B:"', "registry", "1.dkr.ecr.eu.amazonaws.com/a_B:"),
        ('data-dir = "/data"', "data-dir", "/data"),
        ('data-dir = "~/data"', "data-dir", "/home/me/data"),
        ('data_dir = "/data"', "data-dir", "/data"),
        ('timeout = "1h30m"', "timeout", "1h30m"),
        ('timeout = "1"', "timeout", "1"),
        ("timeout = 90", "timeout", "90"),
        ('on-end = "notify-send done; sleep 1"', "on-end", "notify-send done; sleep 1"),
        (f'on-end = "{"x" * MAX_VALUE}"', "on-end", "x" * MAX_VALUE),
    ],
)
def test_a_setting_is_read_with_its_line(text: str, key: str, value: str) -> None:
    assert parse_config(f"# mine\n{text}\n", PATH) == {key: Default(value, "config", "config.toml, line 2")}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('cluster = "A"', '"A" is not a name for a cluster (a-z, 0-9 and "-").', "mlbench config"),
        ('cluster = "-a"', '"-a" is not a name for a cluster (a-z, 0-9 and "-").', "mlbench config"),
        ('cluster = "a-"', '"a-" is not a name for a cluster (a-z, 0-9 and "-").', "mlbench config"),
        (
            f'namespace = "{"a" * 64}"',
            f'"{"a" * 64}" is not a name for a namespace (a-z, 0-9 and "-").',
            "mlbench config",
        ),
        ('registry = "/x"', '"/x" is not an image prefix.', "Write it like ghcr.io/me"),
        ('registry = "a b"', '"a b" is not an image prefix.', "Write it like ghcr.io/me"),
        ('data-dir = "data"', '"data" is not an absolute path.', "Begin it with / or ~/"),
        ('timeout = "0s"', '"0s" must be above 0.', "Write 90s, 15m, 2h or 1h30m."),
        ('timeout = "0"', '"0" must be above 0.', "Write 90s, 15m, 2h or 1h30m."),
        ("timeout = 0", '"0" must be above 0.', "Write 90s, 15m, 2h or 1h30m."),
        ("timeout = -1", '"timeout" is a number, not a text.', 'Write timeout = "…"'),
        ('on-end = " "', '"" is not a command.', "mlbench config unset on-end"),
        ('on-end = "a\\u0007"', None, "mlbench config unset on-end"),
        (f'on-end = "{"x" * (MAX_VALUE + 1)}"', None, "mlbench config unset on-end"),
        ("timeout = false", '"timeout" is a boolean, not a text.', 'Write timeout = "…"'),
        ("cluster = 1.5", '"cluster" is a number, not a text.', 'Write cluster = "…"'),
        ("cluster = {}", '"cluster" is a table, not a text.', 'Write cluster = "…"'),
        ("cluster = 10:00:00", '"cluster" is a date or time, not a text.', 'Write cluster = "…"'),
        ("clusters = 1", 'unknown key "clusters". Did you mean "cluster"?', f"Known keys: {', '.join(SETTINGS)}"),
        (
            'data-dir = "/a"\ndata_dir = "/b"',
            '"data-dir" is given twice, with "-" and with "_".',
            "Edit config.toml",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_line_and_a_remedy(text: str, message: str | None, hint: str) -> None:
    error = refuse(f"\n{text}")
    line = 3 if "data_dir" in text else 2
    assert error.message.startswith(f"config.toml, line {line}: ")
    if message is not None:
        assert error.message == f"config.toml, line {line}: {message}"
    assert error.hint == hint


def test_a_file_that_is_not_toml_is_named() -> None:
    error = refuse('timeout = "1h')
    assert error.message.startswith("config.toml: not valid TOML: ")
    assert error.hint == "Edit config.toml"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("timeout = true", 1),
        ("# timeout = 1\n\ntimeout = true", 3),
        ('"timeout" = true', 1),
        ("'timeout' = true", 1),
        ("[timeout]", 1),
        ("x.timeout = 1\ntimeout = true", None),  # another key comes first
        ("  timeout   =   true", 1),
        ("timeout.x = 1", 1),
    ],
)
def test_the_line_of_a_setting_is_found(text: str, line: int | None) -> None:
    message = refuse(text).message
    assert message.startswith(f"config.toml, line {line}: " if line else "config.toml, line 1: unknown key")


def test_the_environment_counts_unless_it_is_empty(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.find_default("data-dir") is None
    file.parent.mkdir()
    file.write_text('data-dir = "/a"\n')
    assert config.find_default("data-dir") == Default("/a", "config", f"{file}, line 1")
    monkeypatch.setenv("MLBENCH_DATA_DIR", "b")  # relative to the folder of the shell
    assert config.find_default("data-dir") == Default("b", "environment", "MLBENCH_DATA_DIR")
    monkeypatch.setenv("MLBENCH_DATA_DIR", "~/b")
    assert config.from_environment("data-dir") == Default("/home/me/b", "environment", "MLBENCH_DATA_DIR")
    monkeypatch.setenv("MLBENCH_DATA_DIR", "")
    assert config.from_environment("data-dir") is None
    monkeypatch.setenv("MLBENCH_TIMEOUT", "soon")
    with pytest.raises(UsageError, match=r'^MLBENCH_TIMEOUT: "soon" is not a duration'):
        config.find_default("timeout")
    assert config.find_default("cluster") is None  # other settings can be read


# --- changes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "key", "value", "after"),
    [
        (None, "timeout", "1h", 'timeout = "1h"\n'),
        ("", "timeout", "1h", 'timeout = "1h"\n'),
        ('cluster = "a"', "timeout", "1h", 'cluster = "a"\ntimeout = "1h"\n'),
        ('timeout = "2h" # old\ncluster = "a"\n', "timeout", "1h", 'timeout = "1h"\ncluster = "a"\n'),
        ('# first\ncluster = "a"\n\n# last\n', "cluster", "b", '# first\ncluster = "b"\n\n# last\n'),
        ('data_dir = "/a"\n', "data-dir", "/b", 'data-dir = "/b"\n'),
        (None, "on-end", 'echo "ü\\"', 'on-end = "echo \\"ü\\\\\\""\n'),
        (None, "data-dir", "~/x", 'data-dir = "~/x"\n'),
        ("timeout = 60\n", "cluster", "a", 'timeout = 60\ncluster = "a"\n'),
    ],
)
def test_a_change_replaces_the_line_of_its_setting(
    file: Path, before: str | None, key: str, value: str, after: str
) -> None:
    if before is not None:
        file.parent.mkdir()
        file.write_text(before)
    found = set_value(key, value)
    assert file.read_text("utf-8") == after
    line = 1 + after.splitlines().index(next(text for text in after.splitlines() if text.startswith(key)))
    assert (found.source, found.origin) == ("config", f"{file}, line {line}")
    assert found.value == value.replace("~", "/home/me")


def test_a_folder_is_written_as_seen_from_everywhere(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set_value("data_dir", "sets/../x").value == os.path.join(os.getcwd(), "x")


@pytest.mark.parametrize(
    ("key", "value"), [("timeout", "soon"), ("timeout", "0"), ("cluster", "A b"), ("data-dir", ""), ("registry", "")]
)
def test_a_wrong_value_changes_nothing(file: Path, key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{key}: "):
        set_value(key, value)
    assert not file.exists()


def test_a_setting_is_removed_with_its_line_alone(file: Path) -> None:
    assert not unset_value("timeout")
    assert not file.exists()
    file.parent.mkdir()
    file.write_text('# first\ntimeout = "1h"\ncluster = "a"\n')
    assert unset_value("timeout")
    assert file.read_text() == '# first\ncluster = "a"\n'
    assert not unset_value("timeout")
    assert unset_value("cluster")
    assert file.read_text() == "# first\n"


@pytest.mark.parametrize(
    "text",
    [
        'cluster = """a\n"""\n',  # no name
        'timeout = """\n1h"""\n',
        'on-end = """x \\\n  y"""\n',
    ],
)
def test_a_setting_over_several_lines_is_left_to_its_author(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    key = text.split(" ")[0]
    with pytest.raises(UsageError):
        unset_value(key)
    with pytest.raises(UsageError) as caught:
        set_value(key, "1h" if key == "timeout" else "b")
    assert str(file) in caught.value.message
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_named(file: Path) -> None:
    file.parent.parent.mkdir(exist_ok=True)
    file.parent.write_text("in the way")
    with pytest.raises(UsageError, match=r"The config file .*config\.toml cannot be (read|written): Not a directory"):
        set_value("timeout", "1h")


def test_a_home_of_nobody_is_refused(file: Path) -> None:
    with pytest.raises(UsageError) as caught:
        set_value("data-dir", "~no-such-user/x")
    assert caught.value.message == 'data-dir: "~no-such-user/x" is not an absolute path.'
    assert not file.exists()


def test_a_file_that_is_no_text_is_named(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"timeout = \xff")
    with pytest.raises(UsageError) as caught:
        config.read_config()
    assert (caught.value.message, caught.value.hint) == (f"The config file {file} is not UTF-8.", f"Edit {file}")
