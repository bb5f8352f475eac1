"""Kubeconfigs as people have them: merged, relative, with plugins, and broken in every way; never written."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube import logins
from mlbench_cli.kube.access import Access

CA = b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"


def config(
    user: Any = None, cluster: Any = None, context: Any = None, name: str = "c", current: str = "c"
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": current,
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}.invalid/", **(cluster or {})}}],
        "users": [{"name": name, "user": user or {}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, **(context or {})}}],
    }


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def plugin(folder: Path, output: str, code: int = 0) -> dict[str, Any]:
    script = folder / "plugin"
    script.write_text(
        f'#!/bin/sh\necho run >> {folder}/runs\necho "$KUBERNETES_EXEC_INFO" > {folder}/info\n{output}\nexit {code}\n'
    )
    script.chmod(0o755)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(script),
            "args": ["a"],
            "env": [{"name": "X", "value": "y"}],
        }
    }


def credential(token: str, expires: str | None = None) -> str:
    status = {"token": token, **({"expirationTimestamp": expires} if expires else {})}
    document = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    return f"echo '{json.dumps(document)}'"


def token_of(access: Access) -> str:
    assert access.token is not None
    return access.token()


def test_a_plain_one(tmp_path: Path) -> None:
    data = base64.b64encode(CA).decode()
    path = write(
        tmp_path / "config",
        config({"token": "t"}, {"certificate-authority-data": data, "tls-server-name": "n", "proxy-url": "http://p:1"}),
    )
    before = path.read_bytes()
    access = Access.from_kubeconfig(path)
    assert (access.server, access.namespace, access.ca) == ("https://c.invalid", "default", CA)
    assert (access.server_name, access.proxy, access.verify) == ("n", "http://p:1", True)
    assert token_of(access) == "t"
    assert path.read_bytes() == before


def test_files_are_relative_to_the_kubeconfig(tmp_path: Path) -> None:
    for name in ("ca", "crt", "key"):
        (tmp_path / name).write_bytes(name.encode())
    path = write(
        tmp_path / "config", config({"client-certificate": "crt", "client-key": "key"}, {"certificate-authority": "ca"})
    )
    access = Access.from_kubeconfig(path)
    assert (access.ca, access.certificate, access.key) == (b"ca", b"crt", b"key")


def test_several_files_are_merged_and_the_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(tmp_path / "one", config({"token": "1"}, context={"namespace": "ns"}))
    other = config({"token": "3"}, name="d", current="d")
    two = write(tmp_path / "two", {**other, "users": [*other["users"], *config({"token": "2"})["users"]]})
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(one), str(tmp_path / "missing"), str(two)]))
    assert token_of(Access.from_kubeconfig()) == "1"
    assert Access.from_kubeconfig().namespace == "ns"
    assert Access.from_kubeconfig(namespace="mine").namespace == "mine"
    assert token_of(Access.from_kubeconfig(context="d")) == "3"


def test_a_plugin_is_asked_when_it_must_be(tmp_path: Path) -> None:
    path = write(tmp_path / "config", config(plugin(tmp_path, credential("secret", "2999-01-01T00:00:00Z"))))
    access = Access.from_kubeconfig(path)
    assert not (tmp_path / "runs").exists()
    assert [token_of(access), token_of(access)] == ["secret", "secret"]
    assert (tmp_path / "runs").read_text() == "run\n"
    assert json.loads((tmp_path / "info").read_text())["kind"] == "ExecCredential"
    assert access.token is not None
    access.token.discard("another")
    access.token()
    assert (tmp_path / "runs").read_text() == "run\n"
    access.token.discard("secret")
    access.token()
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        ("echo 'please log in' >&2", 1, "please log in"),
        ("echo nonsense", 0, "did not answer with an ExecCredential"),
        ("echo '{}'", 0, "did not answer with an ExecCredential"),
        ('echo \'{"status": {"clientCertificateData": "x"}}\'', 0, "gave no token"),
    ],
)
def test_a_plugin_that_fails_is_quoted(tmp_path: Path, output: str, code: int, words: str) -> None:
    access = Access.from_kubeconfig(write(tmp_path / "config", config(plugin(tmp_path, output, code))))
    with pytest.raises(CredentialError, match=words):
        token_of(access)


def test_a_plugin_that_is_not_installed(tmp_path: Path) -> None:
    user = {"exec": {"command": "no-such-plugin", "installHint": "Get it there."}}
    access = Access.from_kubeconfig(write(tmp_path / "config", config(user)))
    with pytest.raises(CredentialError, match="no-such-plugin") as caught:
        token_of(access)
    assert caught.value.hint == "Get it there."


@pytest.mark.parametrize(
    ("document", "kind", "words"),
    [
        ("", UsageError, "no current context"),
        ("a: [", UsageError, "not valid YAML"),
        ("- 1", UsageError, "not a mapping"),
        ("clusters: [1]", UsageError, "not a mapping with"),
        ("clusters: 5", UsageError, '"clusters"'),
        (config(current="x"), NotFoundError, 'no context "x"'),
        ({**config(), "clusters": []}, NotFoundError, 'no cluster "c"'),
        (config(cluster={"server": ""}), UsageError, '"server"'),
        (config(cluster={"server": "ftp://x"}), UsageError, "not an http"),
        (config(cluster={"server": "https://[::1"}), UsageError, "not an http"),
        (config(cluster={"server": "https://x:99999"}), UsageError, "not an http"),
        (config(cluster={"proxy-url": 5}), UsageError, "proxy-url"),
        (config(cluster={"tls-server-name": ["a"]}), UsageError, "tls-server-name"),
        (config(cluster={"certificate-authority-data": "%"}), UsageError, "not base64"),
        (config(cluster={"certificate-authority": "nowhere"}), UsageError, "nowhere"),
        (config({"username": "u"}), UsageError, "username"),
        (config({"auth-provider": {"name": "gcp"}}), UsageError, "auth-provider"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, document: Any, kind: type[MlbenchError], words: str) -> None:
    path = write(tmp_path / "config", document)
    with pytest.raises(kind, match=words):
        Access.from_kubeconfig(path)


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no kubeconfig"):
        Access.from_kubeconfig(tmp_path / "none")


@pytest.mark.parametrize(("field", "value"), [("ca", b"no PEM"), ("certificate", b"no PEM")])
def test_certificates_that_are_none(field: str, value: bytes) -> None:
    with pytest.raises(CredentialError, match="cannot be read"):
        Access("https://c.invalid", **{field: value}).client()  # type: ignore[arg-type]


def test_a_rotated_token_file_is_read_again_before_the_server_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "REREAD_SECONDS", 0.0)
    (tmp_path / "token").write_text("one\n")
    access = Access.from_kubeconfig(write(tmp_path / "config", config({"tokenFile": "token"})))
    assert token_of(access) == "one"
    (tmp_path / "token").write_text("two\n")
    assert token_of(access) == "two"
    (tmp_path / "token").unlink()
    with pytest.raises(CredentialError, match="token file"):
        token_of(access)


def test_without_the_library_the_next_command_is_named() -> None:
    program = (
        "import sys\nsys.modules['kubernetes'] = None\n"
        "from mlbench_cli.errors import UsageError\nfrom mlbench_cli.kube.access import Access\n"
        "try:\n    Access('https://c.invalid').client()\n"
        "except UsageError as error:\n    print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[k8s]" in done.stdout
