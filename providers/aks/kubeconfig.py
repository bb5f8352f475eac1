"""Access to the Kubernetes API of an AKS cluster, with the kubeconfig from Azure, kept in memory."""

import base64
from typing import Any

from mlbench_cli.errors import CredentialError, NotFoundError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Credential, CredentialSource
from providers.aks.api import Azure
from providers.base import TransientError


def access_to(azure: Azure, path: str) -> Access:
    """Server, CA and credentials of the cluster at `path`. Raises NotFoundError if it does not exist."""
    first = [_read_kubeconfig(azure, path)]
    cluster = first[0]["clusters"][0]["cluster"]
    ca = base64.b64decode(cluster["certificate-authority-data"])

    def fetch() -> Credential:
        document = first.pop() if first else _read_kubeconfig(azure, path)
        # A client certificate, a token, or both; without local accounts, a program to run.
        certificate, key, token = (
            document["users"][0]["user"].get(name) for name in ("client-certificate-data", "client-key-data", "token")
        )
        if not token and not certificate:
            raise CredentialError(
                "The cluster's kubeconfig has neither a certificate nor a token: its local accounts are disabled.",
                hint="A policy may demand that. az aks get-credentials, kubelogin convert-kubeconfig -l azurecli, then "
                "mlbench attach-cluster NAME: runs work there, and delete-cluster still deletes this one.",
            )
        return Credential(
            token=token or None,
            certificate=base64.b64decode(certificate) if certificate else None,
            key=base64.b64decode(key) if key else None,
        )

    return Access(cluster["server"], ca=ca, token=CredentialSource(fetch))


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
