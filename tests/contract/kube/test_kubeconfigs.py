"""Kubeconfigs as people have them: mlbench reads them as kubectl does, or says what it does not support."""

import base64
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlbench_cli.errors import CredentialError, MlbenchError, UsageError
from mlbench_cli.kube.access import Access
from tests.contract.kube.exec import execute
from tests.fakes.kube_api import KubeApi

VERSION = "/version"
CERTIFICATE = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(bytes(200)) + b"-----END CERTIFICATE-----\n"
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with KubeApi() as server:
        yield server


def write(path: Path, server: str, user: dict[str, Any], **cluster: Any) -> Path:
    document = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_an_administrator_acts_as_the_user_that_the_kubeconfig_names(server: KubeApi, tmp_path: Path) -> None:
    acting = {
        "as": "system:serviceaccount:bench:runner",
        "as-uid": "7",
        "as-groups": ["bench-users", "system:authenticated"],
        "as-user-extra": {"example.org/Team": ["a", "b"]},
    }
    path = write(tmp_path / "config", server.url, {"token": "t", **acting})
    access = Access.from_kubeconfig(path)
    (tmp_path / "results").mkdir()
    server.folders["p"] = tmp_path / "results"
    with access.client() as api:
        api.get(VERSION)
        api.create("/api/v1/namespaces/default/pods", {"metadata": {"name": "p"}})
    execute(access, "p", ["true"])
    assert len(server.headers) == 3
    for _, headers in server.headers:
        assert sorted((name.lower(), value) for name, value in headers if name.lower().startswith("impersonate")) == [
            ("impersonate-extra-example.org%2fteam", "a"),
            ("impersonate-extra-example.org%2fteam", "b"),
            ("impersonate-group", "bench-users"),
            ("impersonate-group", "system:authenticated"),
            ("impersonate-uid", "7"),
            ("impersonate-user", "system:serviceaccount:bench:runner"),
        ]
    (entry,) = access.compose_kubeconfig("helm")["users"]
    assert acting.items() <= entry["user"].items()


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"as-groups": ["a"]}, '"as" is missing'),
        ({"as": "a\nb"}, "one line"),
        ({"impersonate": "a"}, "unknown to mlbench"),
        ({"token-file": "x"}, "tokenFile"),
    ],
)
def test_what_might_change_who_one_is_is_refused(server: KubeApi, tmp_path: Path, user: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Access.from_kubeconfig(write(tmp_path / "config", server.url, {"token": "t", **user}))
    assert words in caught.value.message


def test_values_that_only_look_right_are_refused(server: KubeApi, tmp_path: Path) -> None:
    """A quoted "false" had switched the check of the server off; a token with a line end is no header."""
    data = {"insecure-skip-tls-verify": "false"}
    path = write(tmp_path / "config", server.url, {"token": "t"}, **data)
    with pytest.raises(UsageError) as caught:
        Access.from_kubeconfig(path)
    assert "neither true nor false" in caught.value.message
    with (
        Access.from_kubeconfig(write(tmp_path / "config", server.url, {"token": "t\n"})).client() as api,
        pytest.raises(CredentialError) as refused,
    ):
        api.get(VERSION)
    assert "line break" in refused.value.message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080"),
        ("HTTPS_PROXY", "socks5h://127.0.0.1:1080"),
        ("HTTP_PROXY", "socks5h://127.0.0.1:1080"),
        ("HTTP_PROXY", "proxy.example:3128"),
        ("http_proxy", "http://127.0.0.1:9"),
    ],
)
def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        access = Access.from_kubeconfig(write(tmp_path / "config", url, {}))
        with access.client() as api:
            assert api.get(VERSION)["major"] == "1"
    (tmp_path / "results").mkdir()
    server.put("pods", {"metadata": {"name": "p"}})
    server.folders["p"] = tmp_path / "results"
    assert execute(access, "p", ["true"]) == b""


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({"HTTPS_PROXY": "proxy.example:3128"}, "http://proxy.example:3128"),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "other.org"}, "http://proxy.example:3128"),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "example.org"}, ""),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": ".example.org:6443"}, ""),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "api.example.org:443"}, "http://proxy.example:3128"),
        ({"https_proxy": "http://proxy.example:3128", "no_proxy": "*"}, ""),
        ({"HTTP_PROXY": "http://proxy.example:3128"}, ""),
        ({"ALL_PROXY": "http://proxy.example:3128"}, ""),
    ],
)
def test_a_proxy_of_the_environment_is_chosen_as_go_does(
    server: KubeApi, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], proxy: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Access("https://api.example.org:6443").configuration().proxy == proxy


def test_networks_of_addresses_need_no_proxy(server: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8, fd00::/8")
    found = [Access(f"https://{host}").configuration().proxy for host in ("10.1.2.3", "[fd00::1]", "11.1.2.3")]
    assert found == ["", "", "http://proxy.example:3128"]


def test_a_proxy_of_another_kind_is_refused_by_the_name_of_its_variable(
    server: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks4://proxy.example:1080")
    with pytest.raises(UsageError, match="HTTPS_PROXY"), Access("https://api.example.org").client() as api:
        api.get(VERSION)


def test_base64_may_have_several_lines_and_nothing_else(server: KubeApi, tmp_path: Path) -> None:
    text = base64.encodebytes(CERTIFICATE).decode()
    data = {"certificate-authority-data": text}
    with Access.from_kubeconfig(write(tmp_path / "config", server.url, {}, **data)).client() as api:
        api.get(VERSION)
    data = {"certificate-authority-data": text.replace("\n", "!")}
    with pytest.raises(UsageError, match="config is not base64"):
        Access.from_kubeconfig(write(tmp_path / "config", server.url, {}, **data))


@pytest.mark.timeout(20)
def test_files_that_never_end_are_refused(server: KubeApi, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(MlbenchError, match="not a regular file"):
            Access.from_kubeconfig(path)
        access = Access.from_kubeconfig(write(tmp_path / "config", server.url, {"tokenFile": str(path)}))
        with pytest.raises(CredentialError, match="not a regular file"), access.client() as api:
            api.get(VERSION)


def test_a_plugin_may_ask_the_person_on_the_terminal(tmp_path: Path) -> None:
    plugin = tmp_path / "login"
    plugin.write_text(
        "#!/bin/sh\necho 'open https://login.example and enter ABCD' >&2\nread answer\n"
        'printf \'{"apiVersion":"client.authentication.k8s.io/v1","status":{"token":"%s"}}\' "$answer"\n'
    )
    plugin.chmod(0o755)
    with KubeApi(tokens=lambda: {"secret"}) as server:
        user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}}
        config = write(tmp_path / "config", server.url, user)
        code = "import sys; from mlbench_cli.kube.access import Access; "
        code += "Access.from_kubeconfig(sys.argv[1]).client().get('/version')"
        terminal, inside = pty.openpty()
        child = subprocess.Popen([sys.executable, "-c", code, str(config)], stdin=inside, stderr=inside)
        os.close(inside)
        said = b""
        while b"ABCD" not in said:
            said += os.read(terminal, 1000)
        os.write(terminal, b"secret\n")
        assert child.wait(150) == 0, said
        os.close(terminal)


def test_a_plugin_that_says_nothing_in_time_is_quoted(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlbench_cli.kube.logins.PLUGIN_SECONDS", 5.0)
    script = "echo 'open https://login.example' >&2; sleep 60"
    user = {"exec": {"command": "sh", "args": ["-c", script], "interactiveMode": "Never"}}
    access = Access.from_kubeconfig(write(tmp_path / "config", server.url, user))
    with pytest.raises(CredentialError, match=r"within 5 s\. open https://login\.example"), access.client() as api:
        api.get(VERSION)
