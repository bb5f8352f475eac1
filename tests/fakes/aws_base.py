"""What all rules of the AWS double build on: requests, moto's answers, states that take some looks."""

import io
import json
import os
import re
import threading
import time
from typing import Any
from urllib.parse import parse_qsl, unquote

os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"

import moto.eks.models
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from tests.fakes.aws_answers import Answer, ApiError

# moto reads all of AWS' endpoints for each role that it looks at; the layer looks at roles itself.
setattr(moto.eks.models, "validate_role_arn", lambda arn: None)  # noqa: B010

ACCOUNT = "123456789012"
LOOKS = 1
# Code, message and status of each kind of trouble. The words are AWS' own if they are known, else ASSUMED.
TROUBLE = {
    "throttle": ("ThrottlingException", "Rate exceeded", 400),
    "error": ("InternalFailure", "An internal error has occurred", 500),
    "quota": ("LimitExceeded", "The maximum number of things has been reached.", 400),
    "deny": ("AccessDenied", "User: arn:aws:iam::123456789012:user/me is not authorized", 403),
    "expired": ("ExpiredToken", "The security token included in the request is expired", 403),
    "skew": ("SignatureDoesNotMatch", "Signature expired: 20261121T000000Z is now earlier than", 403),
}
SCOPE = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/")
EKS_ROUTES: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/clusters", "ListClusters"),
    ("POST", r"/clusters", "CreateCluster"),
    ("GET", r"/cluster-versions", "DescribeClusterVersions"),
    ("GET", r"/addons/supported-versions", "DescribeAddonVersions"),
    ("GET", r"/clusters/([^/]+)", "DescribeCluster"),
    ("POST", r"/tags/([^/]+)", "TagResource"),
    ("DELETE", r"/clusters/([^/]+)", "DeleteCluster"),
    ("POST", r"/clusters/([^/]+)/node-groups", "CreateNodegroup"),
    ("GET", r"/clusters/([^/]+)/node-groups/([^/]+)", "DescribeNodegroup"),
    ("DELETE", r"/clusters/([^/]+)/node-groups/([^/]+)", "DeleteNodegroup"),
    ("GET", r"/clusters/([^/]+)/addons/([^/]+)", "DescribeAddon"),
    ("GET", r"/clusters/([^/]+)/access-entries/([^/]+)/access-policies", "ListAssociatedAccessPolicies"),
)


class Request:
    """One call, as far as the layer has to know it."""

    def __init__(self, environ: dict[str, Any]) -> None:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        self.body = environ["wsgi.input"].read(length) if length else b""
        self.environ = environ
        scope = SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
        self.client, self.region, self.service = scope.groups() if scope else ("?", "?", "?")
        self.path = environ.get("RAW_URI", environ["PATH_INFO"]).partition("?")[0]
        self.parts: list[str] = []
        self.parameters: dict[str, Any] = {}
        self.query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        self.action = self._action()

    def _action(self) -> str:
        if self.service == "eks":
            if self.body:
                self.parameters = json.loads(self.body)
            for method, pattern, name in EKS_ROUTES:
                match = re.fullmatch(pattern, self.path)
                if match and method == self.environ["REQUEST_METHOD"]:
                    self.parts = [unquote(part) for part in match.groups()]
                    return name
        if "HTTP_X_AMZ_TARGET" in self.environ:
            self.parameters = json.loads(self.body or b"{}")
            return str(self.environ["HTTP_X_AMZ_TARGET"]).rpartition(".")[2]
        self.parameters = dict(parse_qsl(self.body.decode()))
        return str(self.parameters.get("Action", "?"))

    @property
    def target(self) -> str:
        """What the call is about, for the log."""
        keys = (
            "repositoryName",
            "StackName",
            "LaunchTemplateName",
            "LaunchTemplateName.1",
            "GroupName",
            "Filter.1.Value.1",
        )
        found = self.parameters.get("nodegroupName") or self.parameters.get("addonName") or self.parameters.get("name")
        return str(
            found or next((self.parameters[key] for key in keys if key in self.parameters), "/".join(self.parts))
        )


class Base:
    """State, and how it is looked at."""

    def __init__(self) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.RLock()
        self.port = 0
        self.rules: dict[str, Any] = {"looks": LOOKS, "no_capacity": []}
        self.log: dict[str, list[dict[str, Any]]] = {}
        self.trouble: dict[str, list[dict[str, Any]]] = {}
        self.left: dict[tuple[str, ...], int] = {}  # looks until a state ends, by thing
        self.until: dict[tuple[str, ...], float] = {}  # and when it may end at the earliest
        self.addons: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.entries: dict[tuple[str, str, str], list[str]] = {}
        self.schedules: dict[tuple[str, str], float] = {}  # when the machines of an auto scaling group end
        self.placements: dict[tuple[str, str], dict[str, Any]] = {}
        self.tokens: dict[str, Answer] = {}

    def forget_kube(self, name: str) -> None:
        """The Kubernetes API of a cluster goes with it."""
        raise NotImplementedError

    def _pass(self, request: Request) -> Answer:
        """moto's own answer."""
        environ = {**request.environ, "wsgi.input": io.BytesIO(request.body)}
        kept: dict[str, Any] = {}

        def start(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            kept.update(status=int(status.split()[0]), headers=headers)

        body = b"".join(self.moto(environ, start))
        headers = [(key, value) for key, value in kept["headers"] if key.lower() != "content-length"]
        return Answer(kept["status"], body, headers)

    def find_trouble(self, client: str, entry: dict[str, Any], region: str) -> dict[str, Any]:
        for trouble in self.trouble.get(client, []):
            if trouble.get("region", region) != region:
                continue
            number, action = trouble.get("number"), trouble.get("action")
            if number is not None and number != entry["number"]:
                continue
            if action is not None and not re.fullmatch(action, f"{entry['action']} {entry['target']}"):
                continue
            if trouble.get("skip", 0) > 0:
                trouble["skip"] -= 1
                continue
            if trouble.get("once_each"):
                seen = trouble.setdefault("seen", [])
                key = f"{entry['action']} {entry['target']}"
                if key in seen:
                    continue
                seen.append(key)
            elif trouble.get("times", 1) <= 0:
                continue
            trouble["times"] = trouble.get("times", 1) - 1
            return trouble
        return {}

    # --- states that take time ------------------------------------------------------------------------------------

    def _begin(self, *thing: str) -> None:
        self.left[thing] = int(self.rules["looks"])
        self.until[thing] = time.monotonic() + float(self.rules.get("seconds", 0.0))

    def _look(self, *thing: str) -> bool:
        """One look more. True if the state that `thing` is in has ended with it."""
        if thing not in self.left:
            return False
        self.left[thing] -= 1
        if self.left[thing] >= 0 or time.monotonic() < self.until[thing]:
            return False
        del self.left[thing]
        return True

    # --- plumbing -------------------------------------------------------------------------------------------------

    def _eks(self, region: str) -> Any:
        return get_backend("eks")[ACCOUNT][region]

    def _cluster(self, region: str, name: str) -> Any:
        cluster = self._eks(region).clusters.get(name)
        if cluster is None:
            raise ApiError("ResourceNotFoundException", f"No cluster found for name: {name}.", 404)
        return cluster

    def _check_role(self, arn: str) -> None:
        if all(role.arn != arn for role in get_backend("iam")[ACCOUNT][arn.split(":")[1]].roles.values()):
            raise ApiError(
                "InvalidParameterException", f"Role with arn: {arn}, could not be assumed because it does not exist"
            )

    def _subnet(self, region: str, name: str) -> Any:
        return get_backend("ec2")[ACCOUNT][region].get_subnet(name)

    def _interface(self, ec2: Any, subnet: Any, description: str, used: bool, **tags: str) -> None:
        eni = ec2.create_network_interface(subnet, "", description=description, tags=tags)
        eni.status = "in-use" if used else "available"

    def _release(self, eni: Any) -> None:
        raise NotImplementedError

    def watch_network(self, region: str, vpc: str, *, returns: bool = True) -> None:
        """Machines have come into a network (`aws_network`)."""
        raise NotImplementedError

    def cross_groups(self, region: str, vpc: str) -> None:
        raise NotImplementedError

    def _groups(self, ec2: Any, vpc: str) -> list[Any]:
        return [group for group in ec2.groups[vpc].values() if group.name != "default"]

    def _vpcs_of(self, name: str, region: str) -> list[str]:
        vpcs = get_backend("ec2")[ACCOUNT][region].vpcs
        marked = {"mlbench-cluster": name}.items()
        return [
            vpc for vpc, item in vpcs.items() if marked <= {tag["key"]: tag["value"] for tag in item.get_tags()}.items()
        ]
