"""Access to the Kubernetes API of an AKS cluster, with the kubeconfig from Azure, kept in memory."""

import base64
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mlbench_cli.errors import CredentialError, NotFoundError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Credential, CredentialSource
from providers.aks.api import Azure, get_token
from providers.base import TransientError

AKS_SERVER = "6dae42f8-4368-4678-94ff-3960e28e3630"  # in Entra, as kubelogin's documentation has it


def access_to(azure: Azure, path: str) -> Access:
    """Server, CA and credentials of the cluster at `path`. Raises NotFoundError if it does not exist."""
    first = [_read_kubeconfig(azure, path)]
    cluster = first[0]["clusters"][0]["cluster"]
    ca = base64.b64decode(cluster["certificate-authority-data"])

    def fetch() -> Credential:
        document = first.pop() if first else _read_kubeconfig(azure, path)
        # A client certificate, a token, or both; without local accounts, a program that asks Entra for a token.
        user = document["users"][0]["user"]
        certificate, key, token = (user.get(name) for name in ("client-certificate-data", "client-key-data", "token"))
        if not token and not certificate and user.get("exec"):
            token = get_token(f"{_entra_server(user['exec'].get('args') or [])}/.default")
        if not token and not certificate:
            raise CredentialError(
                "The cluster's kubeconfig has neither a certificate nor a token: its local accounts are disabled.",
                hint="mlbench create-cluster aks ... --aad GROUP   makes one that members of an Entra group log in to",
            )
        return Credential(
            token=token or None,
            certificate=base64.b64decode(certificate) if certificate else None,
            key=base64.b64decode(key) if key else None,
        )

    return Access(cluster["server"], ca=ca, token=CredentialSource(fetch))


def _entra_server(args: Sequence[str]) -> str:
    """The application that tokens are for: what kubelogin is told, and the same for all AKS clusters."""
    return next((after for word, after in pairwise(args) if word == "--server-id"), AKS_SERVER)


def _read_kubeconfig(azure: Azure, path: str) -> Any:
    import yaml

    what = "give out the cluster's kubeconfig"
    answer, _ = azure.send("POST", f"{path}/listClusterUserCredential", what)
    given = answer.get("kubeconfigs") or []
    if not given:
        raise NotFoundError("Azure returned no kubeconfig for the cluster.")
    try:
        document = yaml.safe_load(base64.b64decode(given[0]["value"]))
        document["clusters"][0]["cluster"]["certificate-authority-data"]
        document["users"][0]["user"]
    except (ValueError, KeyError, IndexError, TypeError, yaml.YAMLError):
        raise TransientError("Azure's kubeconfig of the cluster is not complete yet.") from None
    return document
