"""The servers of the Azure double: resource manager, sign-in and price list, and the cluster's Kubernetes API."""

import base64
import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes.azure_arm import Operation, World
from tests.fakes.azure_facts import API_VERSIONS, PATCHES, PRICES, REGIONS, SIZES, SUBSCRIPTION, TENANT, Message, sku
from tests.fakes.azure_rules import ApiError
from tests.fakes.certificates import server_context, write_certificate
from tests.fakes.kube_workloads import Workloads

CLIENT, SECRET = "99999999-0000-0000-0000-000000000001", "not-a-secret"
SERVICES = ("Microsoft.ContainerService", "Microsoft.Compute", "Microsoft.Network", "Microsoft.ManagedIdentity")
SERVER_ID = "6dae42f8-0000-0000-0000-3960e28e3630"  # of the application that tokens of clusters are for
VERBS = {"GET": "read", "PUT": "write", "PATCH": "write", "DELETE": "delete"}
DAEMON_SET = ("daemonsets", "kube-system", "mlbench-nvidia-device-plugin")
Answer = tuple[int, Any, Operation | None]


class AzureDouble:
    """The servers. `environment` is what points a client at them; `world` is replaced by `reset`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        pem = folder / "server.pem"
        self.certificate = write_certificate(pem, "azure double")
        (folder / "ca.pem").write_bytes(self.certificate)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Arm,), {"double": self}))
        self._http.daemon_threads = True
        self._http.socket = server_context(pem).wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"https://127.0.0.1:{self._http.server_port}"
        self.kube = Workloads(pem, allowed=self.may_enter)
        self.environment = {
            "MLBENCH_AZURE_ENDPOINT": self.url,
            "MLBENCH_AZURE_PRICES_ENDPOINT": self.url,
            "MLBENCH_ACR_ENDPOINT": self.url,
            "AZURE_AUTHORITY_HOST": self.url,
            "AZURE_TENANT_ID": TENANT,
            "AZURE_CLIENT_ID": CLIENT,
            "AZURE_CLIENT_SECRET": SECRET,
            "AZURE_CONFIG_DIR": str(folder / "azure"),
            "REQUESTS_CA_BUNDLE": str(folder / "ca.pem"),
            "NO_PROXY": "127.0.0.1",
        }
        self.reset()

    def reset(self, **values: Any) -> World:
        world = self.world = World(**values)
        world.pidfile = self.folder / "client.pid"
        world.kubeconfig = self._kubeconfig
        world.forget_kubernetes = self._forget_kubernetes
        world.plugin_applied = lambda: self.kube.objects.get(DAEMON_SET)
        self._forget_kubernetes()
        self.kube.nodes = world.nodes
        self.kube.run_pod = lambda method, name, body: world.pods.answer(method, name, body or None, world.machines())
        return world

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.kube.close()

    def _forget_kubernetes(self) -> None:
        self.kube.objects.clear()
        self.kube.outside.clear()
        self.world.pods.found.clear()
        self.kube.put("namespaces", "kube-system")

    def _kubeconfig(self, name: str) -> str:
        ca = base64.b64encode(self.certificate).decode()
        server = f"https://127.0.0.1:{self.kube.port}"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"certificate-authority-data": ca, "server": server}}],
            "users": [{"name": f"clusterUser_{name}", "user": self._user_of(name)}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": f"clusterUser_{name}"}}],
            "current-context": name,
        }
        return base64.b64encode(json.dumps(document).encode()).decode()

    def _user_of(self, name: str) -> Message:
        """A token while local accounts are enabled, else the program that asks Entra for one."""
        named = [item["properties"] for item in self.world.clusters.values() if item["name"] == name]
        if not any(properties.get("disableLocalAccounts") for properties in named):
            return {"token": "of-the-cluster"}
        return {"exec": {"command": "kubelogin", "args": ["get-token", "--environment", "x", "--server-id", SERVER_ID]}}

    def may_enter(self, authorization: str) -> bool:
        """Whether the API of the only cluster lets somebody in."""
        disabled = any(item["properties"].get("disableLocalAccounts") for item in self.world.clusters.values())
        return authorization == f"Bearer {'entra-token' if disabled else 'of-the-cluster'}"


class _Arm(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    double: AzureDouble

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        url = urlsplit(self.path)
        world = self.double.world
        if url.path == "/oauth2/exchange":
            given = parse_qs(body.decode())
            ours = given.get("access_token") == ["token-of-the-tester"] and given["service"][0].endswith(".azurecr.io")
            self._answer(200 if ours else 401, {"refresh_token": f"of-{given['service'][0]}"} if ours else {})
            return
        if "/oauth2/" in url.path or "/.well-known/" in url.path:
            self._sign_in(url.path, parse_qs(body.decode()))
            return
        if url.path.startswith("/api/retail/prices"):
            self._answer(200, self._list_prices(parse_qs(url.query)))
            return
        words = f"{self.command} {_subject(url.path)}"
        try:
            self._authorize()
            status, document, operation = world.serve_logged(
                words.rpartition("/")[0] or words, words, lambda: self._serve(url, json.loads(body or b"{}"))
            )
        except ApiError as error:
            status, document, operation = error.status, error.document, None
        self._answer(status, document, operation)

    do_PUT = do_POST = do_PATCH = do_DELETE = do_GET

    # --- sign-in and prices -------------------------------------------------------------------------------------

    def _sign_in(self, path: str, form: dict[str, list[str]]) -> None:
        world, root = self.double.world, f"{self.double.url}/{TENANT}"
        if "/.well-known/" in path:
            endpoints = {"authorization_endpoint": f"{root}/authorize", "token_endpoint": f"{root}/oauth2/v2.0/token"}
            self._answer(200, {"issuer": f"{root}/v2.0", **endpoints})
            return
        given = {key: values[0] for key, values in form.items()}
        if world.token_answer is not None:
            self._answer(400, world.token_answer)
            return
        if (given.get("client_id"), given.get("client_secret")) != (CLIENT, SECRET):
            self._answer(401, {"error": "invalid_client", "error_description": "AADSTS7000215: Invalid client secret."})
            return
        world.tokens += 1
        token = "entra-token" if given.get("scope", "").startswith(SERVER_ID) else "token-of-the-tester"
        self._answer(200, {"access_token": token, "expires_in": 3600, "token_type": "Bearer"})

    def _list_prices(self, query: dict[str, list[str]]) -> Message:
        """Two pages; the second one by the link of the first."""
        wanted = query.get("$filter", [""])[0]
        found = [
            item
            for item in PRICES
            if f"armRegionName eq '{item['armRegionName']}'" in wanted and f"'{item['armSkuName']}'" in wanted
        ]
        skip = int(query.get("$skip", ["0"])[0])
        page = found[skip : skip + 5]
        more = (
            f"{self.double.url}{self.path.partition('&$skip')[0]}&$skip={skip + 5}" if len(found) > skip + 5 else None
        )
        return {"BillingCurrency": "USD", "Items": page, "NextPageLink": more, "Count": len(page)}

    # --- resource manager ---------------------------------------------------------------------------------------

    def _authorize(self) -> None:
        """The tester may all but what `denied` says."""
        world, action = self.double.world, _action(self.command, urlsplit(self.path).path)
        if self.headers.get("Authorization") != "Bearer token-of-the-tester":
            raise ApiError(401, "InvalidAuthenticationToken", "The access token is invalid.")
        if action:
            world.actions.add(action)
        if action in world.denied:
            words = f"The client '{CLIENT}' does not have authorization to perform action '{action}' over scope."
            raise ApiError(403, "AuthorizationFailed", words)

    def _serve(self, url: Any, body: Message) -> Answer:
        path, query = unquote(url.path), parse_qs(url.query)
        parts = path.split("/")
        _check_version(path, query)
        if path == "/subscriptions":
            listed = [{"subscriptionId": item, "displayName": "tests", "state": "Enabled"}
                      for item in self.double.world.subscriptions]  # fmt: skip
            return 200, {"value": listed}, None
        if parts[2] not in self.double.world.subscriptions:
            raise ApiError(404, "SubscriptionNotFound", f"The subscription '{parts[2]}' could not be found.")
        if len(parts) == 3:
            found = {"subscriptionId": parts[2], "tenantId": TENANT, "displayName": "tests", "state": "Enabled"}
            return 200, found, None
        if len(parts) > 5 and parts[3].lower() == "resourcegroups":
            return self._serve_resource(path, parts, body)
        if parts[3].lower() == "resourcegroups":
            return self._serve_groups(parts, query, body)
        return self._serve_provider(parts, query)

    def _serve_groups(self, parts: list[str], query: dict[str, list[str]], body: Message) -> Answer:
        world = self.double.world
        if len(parts) == 4:
            for name in list(world.groups):
                world.look(f"group {name}")
            wanted = re.fullmatch(r"tagName eq '([^']+)'", query.get("$filter", [""])[0])
            found = [item for item in world.groups.values() if not wanted or wanted[1] in (item.get("tags") or {})]
            return 200, {"value": found}, None
        name = parts[4]
        if self.command == "PUT":
            return (*world.put_group(name, body), None)
        if self.command == "DELETE" and world.locked:
            words = f"The scope '{name}' cannot perform delete operation because following scope(s) are locked: 'x'."
            raise ApiError(409, "ScopeLocked", words)
        if self.command == "DELETE":
            return 202, {}, world.delete_group(name)
        group = world.find_group(name, look=self.command == "GET")
        if self.command == "PATCH":
            group["tags"] = body["tags"]
        return 200, group, None

    def _serve_resource(self, path: str, parts: list[str], body: Message) -> Answer:
        world, kind = self.double.world, parts[7].lower()
        service = parts[6]
        if self.command == "PUT" and service in world.unregistered:
            words = f"The subscription is not registered to use namespace '{service}'. See https://aka.ms/rps-not-found"
            raise ApiError(409, "MissingSubscriptionRegistration", words)
        if kind == "virtualnetworks" and len(parts) == 9:
            return 200, world.find_network(path), None
        if kind != "managedclusters":
            if self.command == "PUT":
                return (*world.put_other(path, body), None)
            found = world.find_other(path)
            if self.command == "DELETE":
                del world.others[path.lower()]
            return 200, found, None
        if path.endswith("/listClusterUserCredential"):
            found = world.find_cluster(path.rpartition("/")[0])
            if found["properties"]["provisioningState"] == "Creating":
                raise ApiError(404, "NotFound", "The cluster has no kubeconfig yet.", flat=True)
            return 200, {"kubeconfigs": [{"name": "clusterUser", "value": world.kubeconfig(found["name"])}]}, None
        if len(parts) == 9:
            return self._serve_cluster(path, body)
        if self.command == "PUT":
            made, operation = world.put_pool(path, body)
            return 201, made, operation
        if self.command == "DELETE":
            return 202, {}, world.delete_pool(path)
        return 200, world.find_pool(path, look=True), None

    def _serve_cluster(self, path: str, body: Message) -> Answer:
        world = self.double.world
        if self.command == "PUT":
            made, operation = world.put_cluster(path, body)
            return 201, made, operation
        if self.command == "DELETE":
            return 202, {}, world.delete_cluster(path)
        return 200, world.find_cluster(path, look=True), None

    def _serve_provider(self, parts: list[str], query: dict[str, list[str]]) -> Answer:
        world, service, rest = self.double.world, parts[4], parts[5:]
        if not rest:
            state = "NotRegistered" if service in world.unregistered else "Registered"
            return 200, {"namespace": service, "registrationState": state}, None
        if rest[0] == "managedClusters":
            return 200, {"value": list(world.clusters.values())}, None
        if rest[0] == "permissions":
            return 200, {"value": [{"actions": ["*"], "notActions": sorted(world.denied)}]}, None
        if rest[0] == "skus":
            region = query["$filter"][0].split("'")[1]
            refused = world.refused_sizes
            listed = [sku(name, name in refused, world.refused_zones.get(name, []), region) for name in SIZES]
            return 200, {"value": listed if region in REGIONS else []}, None
        if rest[-2:-1] == ["operations"]:
            found = world.answer_operation(rest[-1])
            return 202 if world.by_location and found["status"] == "InProgress" else 200, found, None
        if rest[1] not in REGIONS:
            words = f"No registered resource provider found for location '{rest[1]}'."
            raise ApiError(400, "NoRegisteredProviderFound", words)
        if rest[2] == "usages":
            return 200, {"value": world.list_usages()}, None
        versions = [
            {"version": minor, "capabilities": {"supportPlan": ["KubernetesOfficial", "AKSLongTermSupport"]},
             "patchVersions": {patch: {"upgrades": []} for patch in patches}}
            for minor, patches in PATCHES.items()
        ]  # fmt: skip
        old = {
            "version": "1.29",
            "capabilities": {"supportPlan": ["AKSLongTermSupport"]},
            "patchVersions": {"1.29.9": {}},
        }
        return 200, {"values": [*versions, old]}, None

    def _answer(self, status: int, document: Any, operation: Operation | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        world = self.double.world
        if operation is not None:
            place = (
                f"{self.double.url}/subscriptions/{SUBSCRIPTION}/providers/Microsoft.ContainerService/locations/eastus"
            )
            version = "api-version=2025-10-01"
            header = "Location" if world.by_location else "Azure-AsyncOperation"
            self.send_header(header, f"{place}/operations/{operation.name}?{version}")
        if world.retry_after is not None and (operation is not None or "/operations/" in self.path):
            self.send_header("Retry-After", str(world.retry_after))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client was killed
            self.wfile.write(data)


def _check_version(path: str, query: dict[str, list[str]]) -> None:
    """Each service knows its own versions of the API."""
    given = query.get("api-version", [""])[0]
    if not given:
        raise ApiError(
            400, "MissingApiVersionParameter", "The api-version query parameter (?api-version=) is required."
        )
    found = re.findall(r"/providers/(microsoft\.\w+)(?:/(\w+))?", path.lower())
    service, kind = found[-1] if found else ("", "")
    key = service or ("resourcegroups" if "/resourcegroups" in path.lower() else "")
    wanted = API_VERSIONS.get(f"{service}/{kind}") or API_VERSIONS.get(key)
    if given != wanted and len(path.split("/")) != 5:
        raise ApiError(400, "InvalidApiVersionParameter", f"The api-version '{given}' is invalid for '{key}'.")


def _subject(path: str) -> str:
    """The last kind and name of a path: what a log line and a test's trouble name."""
    parts = path.strip("/").split("/")
    if parts[-2:-1] == ["operations"]:
        return "operations/1"
    if parts[-1] == "listClusterUserCredential":
        return f"{parts[-1]}/{parts[-2]}"
    return "/".join(parts[-2:])


def _action(method: str, path: str) -> str:
    """The action of Azure's role-based access that a request needs."""
    parts = path.strip("/").split("/")
    if "/operations/" in path or len(parts) < 3:
        return ""
    if "providers" not in parts:
        return f"Microsoft.Resources/subscriptions/resourceGroups/{VERBS[method]}"
    start = len(parts) - 1 - parts[::-1].index("providers")
    service, rest = parts[start + 1], parts[start + 2 :]
    if not rest:
        return "Microsoft.Resources/subscriptions/providers/read"
    if rest[-1] == "listClusterUserCredential":
        return f"{service}/managedClusters/{rest[-1]}/action"
    kinds = rest[0::2]
    if rest[0] == "locations":
        kinds = ["locations", rest[-1]]
    return f"{service}/{'/'.join(kinds)}/{VERBS[method]}"
