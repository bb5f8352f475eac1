"""Credential plugins: what they are told and what they may answer, as Kubernetes documents its ExecCredential.

https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CredentialError
from mlbench_cli.kube.logins import run_plugin

CLUSTER = {
    "server": "https://172.17.4.100:6443",
    "certificate-authority-data": "LS0t",
    "tls-server-name": "example",
    "extensions": [
        {"name": "other", "extension": {"no": "business of the plugin"}},
        {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "06e3fbd18de8"}},
    ],
    "unknown": "left out",
}


def write_plugin(folder: Path, answer: Mapping[str, Any] | str, **entry: Any) -> dict[str, Any]:
    """An entry of a kubeconfig whose plugin keeps what it is told in `told` and answers `answer`."""
    program = folder / "plugin"
    text = answer if isinstance(answer, str) else json.dumps({"kind": "ExecCredential", "status": answer})
    (folder / "answer").write_text(text)
    program.write_text(f'#!/bin/sh\nprintf %s "$KUBERNETES_EXEC_INFO" > {folder}/told\ncat {folder}/answer\n')
    program.chmod(0o700)
    return {"command": str(program), **entry}


def read_told(folder: Path) -> Any:
    return json.loads((folder / "told").read_text())


def test_it_is_told_of_the_cluster_only_if_its_entry_asks(tmp_path: Path) -> None:
    run_plugin(write_plugin(tmp_path, {"token": "t"}), CLUSTER)
    assert read_told(tmp_path) == {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }
    version = "client.authentication.k8s.io/v1beta1"
    run_plugin(write_plugin(tmp_path, {"token": "t"}, apiVersion=version, provideClusterInfo=True), CLUSTER)
    assert read_told(tmp_path) == {
        "apiVersion": version,
        "kind": "ExecCredential",
        "spec": {
            "interactive": False,
            "cluster": {
                "server": "https://172.17.4.100:6443",
                "certificate-authority-data": "LS0t",
                "tls-server-name": "example",
                "config": {"audience": "06e3fbd18de8"},
            },
        },
    }


def test_a_file_of_authorities_is_handed_over_as_data(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"---")
    entry = write_plugin(tmp_path, {"token": "t"}, provideClusterInfo=True)
    run_plugin(entry, {"server": "https://x", "certificate-authority": str(tmp_path / "ca.pem")})
    assert read_told(tmp_path)["spec"]["cluster"]["certificate-authority-data"] == "LS0t"
    both = {"certificate-authority": str(tmp_path / "ca.pem"), "certificate-authority-data": "YWFh"}
    run_plugin(entry, both)
    assert read_told(tmp_path)["spec"]["cluster"] == {"certificate-authority-data": "YWFh"}


def test_a_token_with_its_end(tmp_path: Path) -> None:
    given = {"token": "secret", "expirationTimestamp": "2018-03-05T17:30:20-08:00"}
    found = run_plugin(write_plugin(tmp_path, given), {})
    assert (found.token, found.certificate, found.key, found.expires) == ("secret", None, None, 1520299820.0)
    utc = {"token": "secret", "expirationTimestamp": "1970-01-01T00:01:00Z"}
    assert run_plugin(write_plugin(tmp_path, utc), {}).expires == 60.0
    assert run_plugin(write_plugin(tmp_path, {"token": "secret"}), {}).expires is None


def test_a_certificate_counts_with_its_key_only(tmp_path: Path) -> None:
    both = {"clientCertificateData": "C", "clientKeyData": "K"}
    found = run_plugin(write_plugin(tmp_path, both), {})
    assert (found.token, found.certificate, found.key) == (None, b"C", b"K")
    half = run_plugin(write_plugin(tmp_path, {"token": "t", "clientCertificateData": "C"}), {})
    assert (half.token, half.certificate, half.key) == ("t", None, None)
    for lonely in ({"clientCertificateData": "C"}, {"clientKeyData": "K"}, {"token": ""}, {"token": 7}, {}):
        with pytest.raises(CredentialError, match="no token, and no client certificate with its key"):
            run_plugin(write_plugin(tmp_path, lonely), {})


@pytest.mark.parametrize(
    "answer", ["", "[]", "{}", '{"status": null}', '{"status": {"token": "t", "expirationTimestamp": "soon"}}']
)
def test_other_answers_are_named(tmp_path: Path, answer: str) -> None:
    with pytest.raises(CredentialError, match="did not answer with an ExecCredential"):
        run_plugin(write_plugin(tmp_path, answer), {})


def test_a_plugin_that_fails_is_quoted(tmp_path: Path) -> None:
    entry = write_plugin(tmp_path, {"token": "t"})
    (tmp_path / "plugin").write_text("#!/bin/sh\necho please log in >&2\nexit 3\n")
    with pytest.raises(CredentialError, match=r"gave no credentials \(exit 3\): please log in"):
        run_plugin(entry, {})


def test_its_arguments_and_variables_are_those_of_its_entry(tmp_path: Path) -> None:
    entry = write_plugin(tmp_path, "", args=["one", 2], env=[{"name": "WHO", "value": "me"}])
    (tmp_path / "plugin").write_text('#!/bin/sh\nprintf \'{"status": {"token": "%s"}}\' "$WHO $*"\n')
    assert run_plugin(entry, {}).token == "me one 2"
