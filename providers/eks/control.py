"""The control plane of a cluster, its add-ons, and who else may use it."""

import base64
import time
import uuid
from typing import Any

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Token
from mlbench_cli.model import Cluster
from providers.base import MARK, Found, Progress, Resource, TransientError, marks
from providers.eks.aws import Aws, judged, session
from providers.eks.network import Stack

# The server takes a token for 15 minutes; Token renews at three quarters of what is said here.
TOKEN_SECONDS = 13 * 60
ADMIN_POLICY = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
# Without this agent nothing enforces the NetworkPolicy that a run brings along.
SETTINGS = {"vpc-cni": '{"enableNetworkPolicy": "true"}'}
IN_THE_MAKING = ("PENDING", "CREATING", "UPDATING")


class Made(Resource):
    """What EKS makes: described under a name, tagged in the call, busy with one thing at a time."""

    def __init__(self, cluster: Cluster, aws: Aws) -> None:
        self.cluster = cluster
        self.aws = aws
        self.token = uuid.uuid4().hex
        self.refused: str | None = None  # why EKS would not remove it when it was last asked

    def describe(self) -> dict[str, Any] | None:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError

    def difference(self, described: dict[str, Any]) -> str | None:
        return None

    def flaw(self, described: dict[str, Any]) -> str | None:
        """Why it will never be ready."""
        return _issues(described) or described["status"] if described["status"] == "CREATE_FAILED" else None

    def find(self) -> Found | None:
        described = self.describe()
        if described is None:
            return None
        state = described["status"]
        return Found(
            state,
            ours=(described.get("tags") or {}).get(MARK) == self.cluster.name,
            deleting=state == "DELETING",
            # EKS removes some things while they are made and others not: it is asked, and if it says no, waited for.
            busy=self.refused if state in IN_THE_MAKING else None,
            broken=self.flaw(described) or (_issues(described) or state if state == "DELETE_FAILED" else None),
            differs=self.difference(described),
        )

    def delete(self) -> None:
        self.token = uuid.uuid4().hex
        self.refused = None
        try:
            self.remove()
        except NotFoundError:
            return
        except UsageError as error:
            if not str(error.details.get("aws", "")).startswith("ResourceInUse"):
                raise
            self.refused = error.message
            raise TransientError(error.message) from None

    def described(self) -> dict[str, Any]:
        found = self.describe()
        if found is None:
            raise TransientError(f'AWS does not show the {self.kind} "{self.name}" yet.')
        return found


class ControlPlane(Made):
    kind = "EKS cluster"
    create_seconds = 2400.0
    delete_seconds = 2400.0

    def __init__(
        self, cluster: Cluster, aws: Aws, stack: Stack, version: str | None = None, allowed: tuple[str, ...] = ()
    ) -> None:
        super().__init__(cluster, aws)
        self.name = cluster.name
        self.stack = stack
        self.needs = (stack,)
        self.version = version
        self.allowed = allowed
        self.remove_command = f"aws eks delete-cluster --region {aws.region} --name {self.name}"

    def describe(self) -> dict[str, Any] | None:
        return described(self.aws, self.name)

    def create(self) -> None:
        network = self.stack.network()
        access: dict[str, Any] = {"subnetIds": list(network.subnets.values())}
        access |= {"endpointPublicAccess": True, "endpointPrivateAccess": True}
        if self.allowed:
            access["publicAccessCidrs"] = list(self.allowed)
        self.aws.call(
            "eks",
            "create_cluster",
            name=self.name,
            roleArn=network.control_role,
            resourcesVpcConfig=access,
            accessConfig={"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": True},
            # Standard support ends by itself; extended support costs six times as much.
            upgradePolicy={"supportType": "STANDARD"},
            bootstrapSelfManagedAddons=False,
            tags=marks(self.cluster),
            clientRequestToken=self.token,
            **({"version": self.version} if self.version else {}),
        )

    def poll(self) -> Progress:
        found = self.described()
        if found["status"] == "ACTIVE":
            return Progress(True)
        if found["status"] == "FAILED":
            raise judged_issues(found, f"The EKS cluster {self.name} was not made")
        return Progress(False, f"its control plane is {found['status']}")

    def remove(self) -> None:
        self.aws.call("eks", "delete_cluster", name=self.name)

    def flaw(self, described: dict[str, Any]) -> str | None:
        return _issues(described) or "FAILED" if described["status"] == "FAILED" else None

    def difference(self, described: dict[str, Any]) -> str | None:
        if self.version and described.get("version") != self.version:
            return f"it has Kubernetes {described.get('version')}, not {self.version}"
        return None

    def access(self) -> Access:
        return access_to(self.aws, self.name)


class AddOn(Made):
    """A part of Kubernetes that EKS installs and that goes with `goes_with`."""

    kind = "add-on"
    create_seconds = 1200.0

    def __init__(self, plane: ControlPlane, addon: str, needs: tuple[Resource, ...] = ()) -> None:
        super().__init__(plane.cluster, plane.aws)
        self.addon = addon
        self.name = f"{plane.name}/{addon}"
        self.plane = plane
        self.needs = needs or (plane,)
        # With the machines it runs on, since those have to go before the control plane can.
        self.goes_with = self.needs[-1]
        self.remove_command = (
            f"aws eks delete-addon --region {self.aws.region} --cluster-name {plane.name} --addon-name {addon}"
        )

    def describe(self) -> dict[str, Any] | None:
        try:
            answer = self.aws.call("eks", "describe_addon", clusterName=self.plane.name, addonName=self.addon)
        except NotFoundError:
            return None
        addon: dict[str, Any] = answer["addon"]
        return addon

    def create(self) -> None:
        settings = {"configurationValues": SETTINGS[self.addon]} if self.addon in SETTINGS else {}
        self.aws.call(
            "eks",
            "create_addon",
            clusterName=self.plane.name,
            addonName=self.addon,
            resolveConflicts="OVERWRITE",
            tags=marks(self.cluster),
            clientRequestToken=self.token,
            **settings,
        )

    def poll(self) -> Progress:
        found = self.described()
        if found["status"] == "ACTIVE":
            return Progress(True)
        if found["status"] == "CREATE_FAILED":
            raise judged_issues(found, f"The add-on {self.name} was not made")
        return Progress(False, _issues(found) or f"it is {found['status']}")  # DEGRADED, until its pods run

    def remove(self) -> None:
        self.aws.call("eks", "delete_addon", clusterName=self.plane.name, addonName=self.addon)


class Admin(Resource):
    """Another principal that may do everything on the cluster."""

    kind = "access entry"
    create_seconds = 120.0

    def __init__(self, plane: ControlPlane, principal: str) -> None:
        self.plane = plane
        self.aws = plane.aws
        self.principal = principal
        self.name = f"{plane.name}/{principal}"
        self.needs = (plane,)
        self.goes_with = plane
        self.token = uuid.uuid4().hex
        self._named = {"clusterName": plane.name, "principalArn": principal}

    def find(self) -> Found | None:
        try:
            policies = self.aws.pages(
                "eks", "list_associated_access_policies", "associatedAccessPolicies", **self._named
            )
        except NotFoundError:
            return None
        return Found("there") if any(item["policyArn"] == ADMIN_POLICY for item in policies) else None

    def create(self) -> None:
        try:
            self.aws.call(
                "eks",
                "create_access_entry",
                **self._named,
                tags=marks(self.plane.cluster),
                clientRequestToken=self.token,
            )
        except UsageError as error:
            if not str(error.details.get("aws", "")).startswith("ResourceInUse"):
                raise  # it is there, perhaps without its policy
        scope = {"type": "cluster"}
        self.aws.call("eks", "associate_access_policy", **self._named, policyArn=ADMIN_POLICY, accessScope=scope)

    def poll(self) -> Progress:
        return Progress(self.find() is not None, "its policy is not in force yet")

    def delete(self) -> None:
        return


# --- reaching it ------------------------------------------------------------------------------------------------


def described(aws: Aws, name: str) -> dict[str, Any] | None:
    try:
        answer = aws.call("eks", "describe_cluster", name=name)
    except NotFoundError:
        return None
    cluster: dict[str, Any] = answer["cluster"]
    return cluster


def access_to(aws: Aws, name: str) -> Access:
    """The way to the cluster's API: endpoint and CA as EKS tells them, tokens signed in this process."""
    found = described(aws, name)
    if found is None:
        raise NotFoundError(
            f'There is no EKS cluster "{name}" in {aws.region}.',
            hint=f"mlbench delete-cluster eks {name}   removes what may be left of it",
        )
    if found["status"] not in ("ACTIVE", "UPDATING"):
        raise NotFoundError(
            f'The EKS cluster "{name}" cannot be reached: it is {found["status"]}.',
            hint=f"mlbench delete-cluster eks {name}, or the create-cluster command again",
        )
    ca = base64.b64decode(found["certificateAuthority"]["data"])
    return Access(found["endpoint"], ca=ca, token=Token(lambda: (signed(aws, name), time.time() + TOKEN_SECONDS)))


def signed(aws: Aws, name: str) -> str:
    """A token for the Kubernetes API: a request to STS, signed here and sent by the API server to learn who we are.

    Source: aws-iam-authenticator and `aws eks get-token`.
    """
    from botocore.signers import RequestSigner

    client = aws.client("sts")
    credentials = session().get_credentials()
    if credentials is None:
        raise CredentialError("There are no AWS credentials on this machine.", hint="aws configure or aws sso login")
    service = client.meta.service_model.service_id
    signer = RequestSigner(service, aws.region, "sts", "v4", credentials, session().events)
    request = {
        "method": "GET",
        "url": f"{client.meta.endpoint_url}/?Action=GetCallerIdentity&Version=2011-06-15",
        "body": {},
        "headers": {"x-k8s-aws-id": name},
        "context": {},
    }
    url = signer.generate_presigned_url(request, region_name=aws.region, expires_in=60, operation_name="")
    return "k8s-aws-v1." + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def judged_issues(described: dict[str, Any], what: str) -> MlbenchError:
    """The error for something that EKS calls unhealthy, after the first of its issues."""
    issues = (described.get("health") or {}).get("issues") or [{}]
    said = str(issues[0].get("message") or described["status"])
    return judged_words(str(issues[0].get("code") or described["status"]), f'{what}: "{said}"', said)


def judged_words(code: str, message: str, said: str) -> MlbenchError:
    """EKS hands on what EC2 and IAM say inside its own words; what they mean is taken from there."""
    inner = (
        ("InsufficientInstanceCapacity", ("InsufficientInstanceCapacity", "UnfulfillableCapacity", "no Spot capacity")),
        (
            "VcpuLimitExceeded",
            ("VcpuLimitExceeded", "vCPU limit", "MaxSpotInstanceCountExceeded", "InstanceLimitExceeded"),
        ),
        ("UnauthorizedOperation", ("UnauthorizedOperation", "not authorized")),
    )
    for meant, phrases in inner:
        if code == meant or any(phrase in said for phrase in phrases):
            return judged(meant, message, said)
    return judged(code, f"{message} ({code})", said)


def _issues(described: dict[str, Any]) -> str | None:
    issues = (described.get("health") or {}).get("issues") or []
    return "; ".join(f"{item.get('code')}: {item.get('message')}" for item in issues) or None
