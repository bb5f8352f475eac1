"""Every rule of the dashboard's guard, over real connections."""

import base64
import socket
import stat

import pytest

from tests.contract.server.dashboards import Dashboard

PLACES = ("/", "/api/v1/runs", "/static/x/page.css", "/report?run=alpha-1", "/nowhere")
METHODS = ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS")


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_answered_without_a_token(dashboard: Dashboard, path: str, method: str) -> None:
    answer = dashboard.ask(path, method, token=False)
    assert answer.status == 401
    assert dashboard.token.encode() not in answer.body


def test_a_wrong_token_is_refused_in_every_form(dashboard: Dashboard) -> None:
    wrong = base64.b64encode(b"x:wrong").decode()
    assert dashboard.ask("/?token=wrong", token=False).status == 401
    for header in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {wrong}"},
        {"Authorization": "Basic ?"},
    ):
        assert dashboard.ask("/", headers=header, token=False).status == 401
    cookie = {"Cookie": f"mlbench-{dashboard.port}=wrong"}
    assert b"get-dashboard-url" in dashboard.ask("/", headers=cookie, token=False).body


def test_the_printed_address_becomes_a_cookie_that_other_sites_cannot_use(dashboard: Dashboard) -> None:
    answer = dashboard.ask(f"/?token={dashboard.token}", token=False)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    again = dashboard.ask("/", headers={"Cookie": cookie.split(";")[0]}, token=False)
    assert again.status == 200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host", ["evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""])
def test_another_host_name_is_refused_for_every_method(dashboard: Dashboard, method: str, host: str) -> None:
    name = host.format(port=dashboard.port)
    answer = dashboard.ask("/api/v1/runs", method, {"Host": name} if not name else None, host=name or None)
    assert answer.status in ((421, 400) if not name else (421,))


def test_two_host_headers_are_refused(dashboard: Dashboard) -> None:
    lines = (
        "GET / HTTP/1.1",
        f"Host: 127.0.0.1:{dashboard.port}",
        f"Host: 127.0.0.1:{dashboard.port}",
        f"Authorization: Bearer {dashboard.token}",
        "Connection: close",
    )
    with socket.create_connection(("127.0.0.1", dashboard.port), 30) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        assert connection.recv(100).split()[1] in (b"421", b"400")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "LOCALHOST"])
def test_loopback_names_with_the_port_are_accepted(dashboard: Dashboard, name: str) -> None:
    assert dashboard.ask("/api/v1/runs", host=f"{name}:{dashboard.port}").status == 200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_site_is_refused_for_every_method(idle: Dashboard, method: str, header: dict[str, str]) -> None:
    given = {name: value.format(port=idle.port) for name, value in header.items()}
    assert idle.ask("/api/v1/runs", method, given).status == 403


def test_our_own_origin_is_accepted(dashboard: Dashboard) -> None:
    given = {"Origin": f"http://127.0.0.1:{dashboard.port}", "Sec-Fetch-Site": "same-origin"}
    assert dashboard.ask("/api/v1/runs", headers=given).status == 200


@pytest.mark.parametrize("path", PLACES)
def test_no_answer_allows_other_origins_and_all_have_the_headers(dashboard: Dashboard, path: str) -> None:
    for token in (True, False):
        headers = dashboard.ask(path, token=token).headers
        assert not [name for name in headers if name.startswith("access-control")]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "server" not in headers
        assert headers["cache-control"] == "no-store"


def test_files_may_be_kept_and_pages_may_not(dashboard: Dashboard) -> None:
    text = dashboard.ask("/").body.decode()
    path = text.split('rel="stylesheet" href="')[1].split('"')[0]
    assert "immutable" in dashboard.ask(path).headers["cache-control"]
    assert dashboard.ask("/").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/v1/runs"),
        ("POST", "/api/v1/runs/alpha-1/cancel"),
        ("DELETE", "/api/v1/runs/alpha-1"),
    ],
)
def test_without_allow_actions_nothing_can_be_changed(dashboard: Dashboard, method: str, path: str) -> None:
    answer = dashboard.ask(path, method, {"X-Mlbench-Action": "1"}, b"{}")
    assert answer.status == 405
    assert "--allow-actions" in answer.document["message"]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_cookie_alone_cannot_act(idle: Dashboard, method: str) -> None:
    cookie = {"Cookie": f"mlbench-{idle.port}={idle.token}"}
    path = "/api/v1/runs" if method == "POST" else "/api/v1/runs/x"
    assert idle.ask(path, method, cookie, b"{}", token=False).status == 403
    allowed = idle.ask(path, method, {**cookie, "X-Mlbench-Action": "1"}, b"{}", token=False)
    assert allowed.status == (400 if method == "POST" else 404)


def test_remembered_basic_credentials_of_a_browser_cannot_act_alone(idle: Dashboard) -> None:
    basic = base64.b64encode(f"x:{idle.token}".encode()).decode()
    header = {"Authorization": f"Basic {basic}"}
    assert idle.ask("/api/v1/runs/x", "DELETE", {**header, "Sec-Fetch-Site": "same-origin"}, token=False).status == 403
    assert idle.ask("/api/v1/runs/x", "DELETE", header, token=False).status == 404


def test_a_request_has_limits(idle: Dashboard) -> None:
    big = b"x" * 70_000
    assert idle.ask("/api/v1/runs", "POST", body=big).status == 413
    assert idle.ask("/api/v1/runs", "POST", {"Content-Length": "1e3"}, b"{}").status == 400
    assert idle.ask("/?q=" + "a" * 5000).status == 414
    chunks = b"".join(b"4000\r\n" + b"x" * 0x4000 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n"
    answer = idle.ask("/api/v1/runs", "POST", {"Transfer-Encoding": "chunked"}, chunks)
    assert answer.status == 413


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/runs/..%2f..%2fetc%2fpasswd/archive",
        "/api/v1/runs/%2e%2e/archive",
        "/runs/../../etc/passwd",
        "/static/x/..%2f..%2fsecurity.py",
        "/static/x/%2e%2e/app.py",
        "/report?run=/etc/passwd",
        "/report?run=../../alpha-1",
        "/api/v1/runs/alpha-1%00/metrics",
        "/compare?a=/etc/passwd&b=alpha-1",
    ],
)
def test_no_path_comes_from_a_request(dashboard: Dashboard, path: str) -> None:
    answer = dashboard.ask(path)
    assert answer.status == 404
    assert b"root:" not in answer.body


def test_the_address_is_noted_for_this_user_only_and_removed_at_the_end(idle: Dashboard) -> None:
    [path] = idle.home.glob("dashboard-*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_listens_on_loopback_only(dashboard: Dashboard) -> None:
    with open("/proc/net/tcp") as table:
        found = [line.split()[1] for line in table if line.split()[3] == "0A"]
    mine = [address for address in found if address.endswith(f":{dashboard.port:04X}")]
    assert mine == [f"0100007F:{dashboard.port:04X}"]
