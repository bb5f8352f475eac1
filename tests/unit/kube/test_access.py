"""What an access hands to the official client and to other tools, and commands that run in pods."""

import base64
from typing import Any

import pytest

from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Credential, CredentialSource

SERVER = "https://c:6443"


def base64_of(text: bytes) -> str:
    return base64.b64encode(text).decode()


# --- kubeconfigs for other tools ------------------------------------------------------------------------------------


PAIR = {"client-certificate-data": base64_of(b"C"), "client-key-data": base64_of(b"K")}
PLUGIN = {"exec": {"command": "mlbench"}}


@pytest.mark.parametrize(
    ("fixed", "fetched", "given", "user"),
    [
        ((b"C", b"K"), None, None, PAIR),
        ((b"C", b"K"), Credential(token="t"), PLUGIN, PAIR),  # a fixed certificate always
        ((b"C", None), None, PLUGIN, PLUGIN),
        ((None, None), Credential(token="t"), PLUGIN, PLUGIN),
        ((None, None), Credential(token="t"), {}, {}),
        ((None, None), Credential(token="t"), None, {"token": "t"}),
        ((None, None), Credential(certificate=b"C", key=b"K"), None, PAIR),
        ((None, None), Credential(token="t", certificate=b"C", key=b"K"), None, {"token": "t", **PAIR}),
        ((None, None), Credential(token="t", certificate=b"C"), None, {"token": "t"}),
    ],
)
def test_the_login_of_a_kubeconfig_is_a_certificate_or_what_is_given_or_current(
    fixed: tuple[bytes | None, bytes | None],
    fetched: Credential | None,
    given: dict[str, Any] | None,
    user: dict[str, Any],
) -> None:
    source = CredentialSource(lambda: fetched) if fetched else None
    access = Access(SERVER, certificate=fixed[0], key=fixed[1], token=source)
    assert access.compose_kubeconfig("lab", given)["users"][0]["user"] == user


# --- the official client --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proxy", "headers"),
    [
        ("http://proxy:3128", None),
        ("https://proxy", None),
        ("http://me:secret@proxy:3128", {"proxy-authorization": f"Basic {base64_of(b'me:secret')}"}),
        ("http://me@proxy:3128", {"proxy-authorization": f"Basic {base64_of(b'me:')}"}),
    ],
)
def test_a_proxy_of_a_kubeconfig_gets_its_login(proxy: str, headers: dict[str, str] | None) -> None:
    settings = Access(SERVER, proxy=proxy).configuration()
    assert (settings.proxy, settings.no_proxy, settings.proxy_headers) == (proxy, "", headers)


# --- contexts -------------------------------------------------------------------------------------------------------


# --- commands in pods -----------------------------------------------------------------------------------------------


# --- calls without a limit of their own -----------------------------------------------------------------------------
