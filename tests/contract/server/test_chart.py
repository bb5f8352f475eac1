"""The Helm chart of the dashboard: its options and rights are those of the code, and the objects are valid."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from mlbench_cli.app import app
from providers.attached import RULES
from tests.contract.server.dashboards import serve

CHART = Path(__file__).parents[3] / "charts" / "mlbench"
TOKEN = "r" * 24
SET = ["master.image.repository=example/dashboard", "token.text=" + TOKEN]
KINDS = {
    "Deployment": "V1Deployment",
    "Service": "V1Service",
    "ServiceAccount": "V1ServiceAccount",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "Secret": "V1Secret",
    "Ingress": "V1Ingress",
}
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")


def render(*values: str) -> list[dict[str, Any]]:
    """The objects of the chart with some values."""
    words = ["helm", "template", "team", str(CHART), "--kube-version", "1.34.0"]
    words += [word for value in (*SET, *values) for word in ("--set", value)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def test_its_role_is_the_one_that_runs_need() -> None:
    text = (CHART / "templates" / "rbac.yaml").read_text()
    rules = yaml.safe_load("\n".join(line for line in text.splitlines() if line.startswith("- {apiGroups")))
    found = [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in rules]
    assert found == [([group], [kind], list(verbs)) for group, kind, verbs, _ in RULES]


def test_it_uses_options_that_serve_has() -> None:
    group: Any = get_command(app)
    known = {word for option in group.get_command(None, "serve").params for word in option.opts}
    text = (CHART / "templates" / "dashboard.yaml").read_text()
    used = set(re.findall(r"^        - (--[a-z-]+)", text, re.MULTILINE))
    assert {"--token-file", "--public-url", "--max-workers"} <= used <= known


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        (),
        (
            "limits.workers=4",
            "limits.cpu=8000m",
            "limits.gpu=2",
            "tls.secretName=tls",
            "publicUrl=https://m.example.com",
        ),
        ("ingress.enabled=true", "ingress.host=m.example.com", "ingress.tlsSecretName=tls", "ingress.className=nginx"),
        ("persistence.existingClaim=old", "token.existingSecret=mine", "rbac.create=false", "allowActions=false"),
    ],
)
def test_its_objects_are_valid(values: tuple[str, ...]) -> None:
    """The models of the official client take each object and give it back unchanged: no field is unknown to them."""
    from kubernetes import client

    api = client.ApiClient()
    for document in render(*values):
        answer = type("Answer", (), {"data": json.dumps(document)})()
        try:
            model = api.deserialize(answer, KINDS[document["kind"]])
        except TypeError:  # newer clients take the text
            model = api.deserialize(answer.data, KINDS[document["kind"]], "application/json")
        assert api.sanitize_for_serialization(model) == document


@needs_helm
def test_limits_become_options() -> None:
    (deployment,) = [item for item in render("limits.workers=4", "limits.cpu=8000m") if item["kind"] == "Deployment"]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--max-workers=4", "--max-cpus=8"} <= set(arguments)
    assert not any(word.startswith("--max-gpus") for word in arguments)


@needs_helm
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["token.text=x"], "Set master.image.repository"),
        ([SET[0]], "Set token.existingSecret"),
        ([*SET, "publicUrl=https://m.example.com"], "set tls.secretName"),
        ([*SET, "ingress.enabled=true", "ingress.host=m"], "set ingress.tlsSecretName"),
        ([*SET, "limits.nodes=3"], "nodes"),
    ],
)
def test_values_that_cannot_work_are_rejected(values: list[str], reason: str) -> None:
    words = ["helm", "template", "team", str(CHART), "--kube-version", "1.34.0"]
    words += [word for value in values for word in ("--set", value)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert reason in done.stderr


def test_serve_behind_an_ingress(tmp_path: Path) -> None:
    """Only the file's token is valid, the public name is accepted, and its cookie is for HTTPS only."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    (tmp_path / "home").mkdir()
    options = (
        "--token-file",
        str(token),
        "--public-url",
        "https://m.example.com",
        "--allow-actions",
        "--max-workers",
        "2",
    )
    with serve(tmp_path / "home", *options) as dashboard:
        assert dashboard.url == f"https://m.example.com/?token={TOKEN}"
        mine = {"Authorization": f"Bearer {TOKEN}"}
        assert dashboard.ask("/api/v1/runs", headers=mine, token=False, host="m.example.com").status == 200
        assert dashboard.ask("/api/v1/runs", headers=mine, token=False, host="other.example.com").status == 421
        for empty in ({"Authorization": "Bearer "}, {"Cookie": "mlbench="}, {}):
            assert dashboard.ask("/api/v1/runs", headers=empty, token=False, host="m.example.com").status == 401
        public = dashboard.ask(f"/?token={TOKEN}", token=False, host="m.example.com").headers["set-cookie"]
        assert "; Secure" in public
        assert "; Secure" not in dashboard.ask(f"/?token={TOKEN}", token=False).headers["set-cookie"]
        body = b'{"name": "big", "workers": [3], "command": "true", "share_machine": true}'
        answer = dashboard.ask("/api/v1/runs?check=true", "POST", mine, body, token=False)
        assert (answer.status, "the limit of this dashboard is 2" in answer.document["message"]) == (400, True)
