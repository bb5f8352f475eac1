"""Tokens of other people: what each role may do, and which token files are refused."""

import re
from pathlib import Path

import pytest

from mlbench_cli.app import run
from tests.contract.server.dashboards import Dashboard, serve

READ, ACT = "r" * 24, "a" * 24
ACTION = {"X-Mlbench-Action": "1", "Content-Type": "application/json"}
WANTED = b'{"name": "mine", "workers": [1], "command": "true", "share_machine": true}'


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# the team\nread {READ}\nact {ACT}  # CI\n")
    path.chmod(0o600)
    return path


def ask(dashboard: Dashboard, path: str, token: str, method: str = "GET", body: bytes | None = None) -> int:
    headers = {"Authorization": f"Bearer {token}", **(ACTION if method != "GET" else {})}
    return dashboard.ask(path, method, headers, body, token=False).status


def test_a_reader_reads_and_an_actor_acts(shared: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "home", "--allow-actions", "--token-file", str(shared)) as dashboard:
        assert [ask(dashboard, "/api/v1/runs", token) for token in (READ, ACT, "x" * 24)] == [200, 200, 401]
        assert ask(dashboard, "/api/v1/runs?check=true", READ, "POST", WANTED) == 403
        assert ask(dashboard, "/api/v1/runs?check=true", ACT, "POST", WANTED) == 200
        page = {"Authorization": f"Bearer {READ}", "Accept": "text/html"}
        assert b"New run" not in dashboard.ask("/", headers=page, token=False).body
        assert dashboard.ask("/new", headers=page, token=False).status == 400
        cookie = dashboard.ask(f"/?token={READ}", token=False).headers["set-cookie"]
        assert READ in cookie  # a reader's link never turns into the owner's cookie
        assert dashboard.token not in cookie


def test_nobody_acts_on_a_dashboard_that_allows_no_actions(shared: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "home", "--token-file", str(shared)) as dashboard:
        assert ask(dashboard, "/api/v1/runs?check=true", ACT, "POST", WANTED) == 405


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("read short", 0o600, "is weak"),
        (f"write {READ}", 0o600, "is not a role and a token"),
        ("# nothing", 0o600, "has no token"),
        (f"read {READ}", 0o644, "Every user of this machine"),
    ],
)
def test_a_token_file_that_protects_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, mode: int, reason: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    assert run(["serve", "--token-file", str(path)]) == 2
    assert reason in " ".join(re.split(r"\s+", capsys.readouterr().err))
