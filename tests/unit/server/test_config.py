"""Who may use a dashboard, by which addresses, and what may be started on it."""

from pathlib import Path

import pytest

pytest.importorskip("starlette")

from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.server.config import (
    FILE,
    MIN_TOKEN,
    Grant,
    Limits,
    Role,
    ServerConfig,
    read_address,
    read_grants,
    write_address,
)
from mlbench_cli.server.prometheus import format_row
from tests.unit.results.runs import spec

TOKEN = "t" * MIN_TOKEN


def asked(workers: int = 2, **changes: object) -> RunSpec:
    return spec(name="a-2", workers=workers, **changes)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(workers=1), "a-2 requests 2 workers; the limit of this dashboard is 1."),
        (Limits(cpus=3.5), "requests 4 CPUs per worker; the limit of this dashboard is 3.5."),
        (Limits(gpus=0), "requests 1 GPUs per worker; the limit of this dashboard is 0."),
    ],
)
def test_a_run_above_a_limit_is_refused_with_the_limit(limits: Limits, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        limits.check([asked(1, cpus=1.0), asked(2, cpus=4.0, gpus_per_worker=1)])
    assert reason in caught.value.message


def test_a_run_may_be_as_large_as_the_limits() -> None:
    Limits(workers=2, cpus=4.0, gpus=1).check([asked(2, cpus=4.0, gpus_per_worker=1)])
    Limits().check([asked(4096)])


def write_tokens(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_file_has_roles_tokens_and_comments(tmp_path: Path) -> None:
    text = f"# the team\n\nread {TOKEN}\n  act {'a' * MIN_TOKEN}.~-_  # CI\n"
    assert read_grants(write_tokens(tmp_path, text)) == (
        Grant(TOKEN, Role.READ),
        Grant("a" * MIN_TOKEN + ".~-_", Role.ACT),
    )


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601])
def test_a_token_file_that_others_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match="Every user"):
        read_grants(write_tokens(tmp_path, f"read {TOKEN}\n", mode))


def test_a_token_file_of_a_group_is_accepted(tmp_path: Path) -> None:
    assert read_grants(write_tokens(tmp_path, f"read {TOKEN}\n", 0o640))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"read {TOKEN[:-1]}", "Line 2 is weak"),
        (f"read {TOKEN}/", "Line 2 is weak"),
        (f"read {TOKEN} x", "is not a role and a token"),
        (f"READ {TOKEN}", "is not a role and a token"),
    ],
)
def test_a_bad_line_of_a_token_file_is_numbered(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_grants(write_tokens(tmp_path, f"# team\n{line}\n"))
    assert reason.removeprefix("Line 2 ") in caught.value.message
    assert "ine 2 of" in caught.value.message


def test_the_owner_has_all_rights_and_others_their_own() -> None:
    config = ServerConfig(Path("/none"), 8080, token="owner", grants=(Grant("reader", Role.READ),))
    assert [config.role_of(token) for token in ("owner", "reader", "", "owne")] == [Role.ACT, Role.READ, None, None]
    assert ServerConfig(Path("/none"), 8080, token="").role_of("") is None


@pytest.mark.parametrize(
    ("port", "has_tls", "is_bare"), [(443, True, True), (80, False, True), (443, False, False), (80, True, False)]
)
def test_browsers_leave_out_the_default_port_of_their_scheme(port: int, has_tls: bool, is_bare: bool) -> None:
    hosts = ServerConfig(Path("/none"), port, names=("a.example",), has_tls=has_tls).hosts
    assert hosts == ({f"a.example:{port}", "a.example"} if is_bare else {f"a.example:{port}"})


def test_a_proxy_adds_its_name_and_makes_addresses_secure() -> None:
    config = ServerConfig(Path("/none"), 8080, token="t", names=("localhost",), public_url="https://Bench.example.com")
    assert config.hosts == {"localhost:8080", "bench.example.com"}
    assert config.origins == {"http://localhost:8080", "http://bench.example.com", "https://bench.example.com"}
    assert config.is_secure("BENCH.example.com")
    assert not config.is_secure("localhost:8080")
    assert config.url == "https://Bench.example.com/?token=t"
    plain = ServerConfig(Path("/none"), 8080, token="", names=("localhost",))
    assert plain.url == "http://localhost:8080/"
    assert ServerConfig(Path("/none"), 8443, has_tls=True).is_secure("127.0.0.1:8443")


def test_two_dashboards_of_a_machine_have_different_cookies() -> None:
    """Browsers share cookies between the ports of a host."""
    assert ServerConfig(Path("/none"), 1).cookie != ServerConfig(Path("/none"), 2).cookie
    assert len(ServerConfig(Path("/none"), 1).token) >= MIN_TOKEN


def test_the_address_of_a_dashboard_is_for_its_user_and_ends_with_its_process(tmp_path: Path) -> None:
    config = ServerConfig(tmp_path, 8080, token="t")
    path = write_address(config)
    assert path.stat().st_mode & 0o777 == 0o600
    found = read_address(tmp_path)
    assert found is not None
    assert (found.url, found.client_url) == ("http://127.0.0.1:8080/?token=t", "127.0.0.1:8080/t/t")
    path.write_text(path.read_text().replace(f'"pid": {found.pid}', f'"pid": {(1 << 22) + 1}'))  # above pid_max
    assert read_address(tmp_path) is None
    (tmp_path / FILE).write_text("{")
    assert read_address(tmp_path) is None


def test_label_values_are_escaped_as_prometheus_reads_them() -> None:
    """Backslash, quote and line feed, by the text format 0.0.4."""
    assert format_row("m", {}, 3.0) == "m 3.0"
    assert format_row("m", {"a": 'x\\y"z\n', "b": "1"}, 0.5) == 'm{a="x\\\\y\\"z\\n",b="1"} 0.5'


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_grants(tmp_path / "gone")
    path = write_tokens(tmp_path, "")
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot be read"):
        read_grants(path)


def test_a_token_file_of_comments_has_no_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no token"):
        read_grants(write_tokens(tmp_path, "# nobody\n\n"))


def test_a_dashboard_of_this_machine_is_reached_by_all_names_of_it() -> None:
    hosts = ServerConfig(Path("/none"), 8080, token="t").hosts
    assert hosts == {"127.0.0.1:8080", "localhost:8080", "[::1]:8080"}
