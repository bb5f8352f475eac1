"""Starting the dashboard: what is refused, and what another address needs."""

import json
import os
import socket
import ssl
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.errors import UsageError
from mlbench_cli.server.config import Limits, ServerConfig, read_token
from tests.contract.server.dashboards import serve
from tests.fakes.certificates import write_certificate
from tests.unit.results.runs import spec


def test_what_cannot_be_served_is_refused_before_it_starts(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.write_text("x")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            (["--port", str(taken.getsockname()[1])], 2, "--port 0"),
            (["--host", "0.0.0.0"], 2, "--insecure"),
            (["--host", "192.0.2.1", "--insecure"], 2, "cannot listen on 192.0.2.1"),
            (["--tls-cert", str(certificate)], 2, "must be given together"),
            (["--tls-cert", str(certificate), "--tls-key", str(tmp_path / "none")], 4, "no file"),
            (["--cluster", "nowhere"], 4, "nowhere"),
        ]
        for words, code, text in cases:
            assert run(["serve", *words]) == code, words
            assert text in capsys.readouterr().err, words
    assert not [*home.glob("dashboard-*.json")]


def test_the_address_of_a_dashboard_survives_the_end_of_another(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    with serve(home) as first:
        with serve(home) as second:
            assert run(["get-dashboard-url"]) == 0
            assert capsys.readouterr().out.strip() == second.url
        assert run(["get-dashboard-url"]) == 0
        assert capsys.readouterr().out.strip() == first.url


def test_the_address_of_a_dashboard_that_was_killed_is_forgotten_and_that_of_another_machine_stays(home: Path) -> None:
    home.mkdir()
    with serve(home):
        [path] = home.glob("dashboard-*.json")
        note = json.loads(path.read_text())
    path.write_text(json.dumps({**note, "pid": os.getpid()}))  # its number belongs to another process now
    assert run(["get-dashboard-url"]) == 4
    far = home / "dashboard-1.json"
    far.write_text(json.dumps({**note, "host": "far", "boot_id": "another"}))
    assert run(["get-dashboard-url"]) == 4
    with serve(home):
        assert (path.exists(), far.exists()) == (False, True)


def test_another_address_is_served_with_tls_and_marks_its_cookie_secure(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "both.pem"
    certificate = write_certificate(file, "localhost")
    options = ("--host", "0.0.0.0", "--tls-cert", str(file), "--tls-key", str(file))
    home.mkdir()
    with serve(home, *options) as dashboard:
        assert dashboard.url.startswith("https://")
        context = ssl.create_default_context(cadata=certificate.decode())
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _StayHere())
        answer = opener.open(f"https://127.0.0.1:{dashboard.port}/?token={dashboard.token}", timeout=30)
        assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(("mode", "is_refused"), [(0o600, False), (0o640, False), (0o604, True), (0o602, True)])
def test_a_token_that_everybody_can_read_is_refused(tmp_path: Path, mode: int, is_refused: bool) -> None:
    path = tmp_path / "token"
    path.write_text(f"{'x' * 32}\n")
    path.chmod(mode)  # of a Secret in a pod, the group can read it
    with pytest.raises(UsageError, match="Every user") if is_refused else nullcontext():
        assert read_token(path) == "x" * 32


def test_a_limit_can_be_reached_and_not_passed() -> None:
    limits = Limits(workers=4)
    limits.check([spec(workers=4)])
    with pytest.raises(UsageError, match="requests 5 workers; the limit of this dashboard is 4"):
        limits.check([spec(workers=5)])
    with pytest.raises(UsageError, match="requests 2 GPUs per worker; the limit of this dashboard is 1"):
        Limits(cpus=8, gpus=1).check([spec(cpus=8.0, gpus_per_worker=2)])


def test_browsers_write_an_origin_in_lower_case(tmp_path: Path) -> None:
    assert "https://team.example.com" in ServerConfig(tmp_path, 80, public_url="https://Team.Example.com").origins


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Hands out a redirect instead of following it."""

    def http_error_303(self, req: object, fp: object, code: int, msg: str, headers: object) -> object:
        return fp
