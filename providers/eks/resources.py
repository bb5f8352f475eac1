"""The control plane of a cluster, its add-ons, and its additional administrators."""

import base64
import re
import time
import uuid
from typing import Any

from mlbench_cli.errors import (
    CapacityError,
    CredentialError,
    MlbenchError,
    NeverStartedError,
    NotFoundError,
    UsageError,
)
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Token
from mlbench_cli.model.run import Cluster
from providers.base import (
    CLUSTER_TAG,
    BusyError,
    Cause,
    Part,
    Readiness,
    Resource,
    ResourceStatus,
    TransientError,
    error_from_causes,
    ownership_tags,
)
from providers.eks.api import Aws, error_from_code, session
from providers.eks.network import Stack
from providers.eks.versions import version_for
from providers.pins import find_pin

# The server accepts a token for 15 minutes; Token renews after three quarters of this time.
TOKEN_SECONDS = 13 * 60
ADMIN_POLICY = "arn:{}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"  # of the partition
# Without this agent, a run's NetworkPolicy would not be enforced.
SETTINGS = {"vpc-cni": '{"enableNetworkPolicy": "true"}'}
CREATION_STATES = ("PENDING", "CREATING", "UPDATING")


def admin_policy(region: str) -> str:
    """The ARN of EKS' administrator policy in the region's partition: of AWS, China or GovCloud."""
    return ADMIN_POLICY.format(session().get_partition_for_region(region))


class EksResource(Resource):
    """A resource that EKS creates: found by name, tagged in the create call, with one operation at a time."""

    def __init__(self, cluster: Cluster, aws: Aws) -> None:
        self.cluster = cluster
        self.aws = aws
        self.token = uuid.uuid4().hex
        self.refused: str | None = None  # why EKS last rejected its deletion

    def find_raw(self) -> dict[str, Any] | None:
        """AWS' description of the resource; None if it does not exist."""
        raise NotImplementedError

    def remove(self) -> None:
        """Send the delete call of this kind of resource. Raises NotFoundError if it does not exist."""
        raise NotImplementedError

    def find_difference(self, described: dict[str, Any]) -> str | None:
        """How the resource differs from the request; None if it does not."""
        return None

    def find_flaw(self, described: dict[str, Any]) -> str | None:
        """Why it will never be ready; None if it may be."""
        return _issues(described) or described["status"] if described["status"] == "CREATE_FAILED" else None

    def find(self) -> ResourceStatus | None:
        """The status from AWS' description; a failed deletion and reported issues count as broken."""
        described = self.find_raw()
        if described is None:
            return None
        state = described["status"]
        return ResourceStatus(
            state,
            ours=(described.get("tags") or {}).get(CLUSTER_TAG) == self.cluster.name,
            deleting=state == "DELETING",
            # EKS may reject deleting a resource that it is creating: try, and wait if rejected.
            busy=self.refused if state in CREATION_STATES else None,
            broken=self.find_flaw(described) or (_issues(described) or state if state == "DELETE_FAILED" else None),
            differs=self.find_difference(described),
        )

    def delete(self) -> None:
        """Request the deletion; succeeds if it does not exist. Raises BusyError while another operation uses the
        resource."""
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
            raise BusyError(error.message) from None

    def require_raw(self) -> dict[str, Any]:
        """AWS' description of the resource. Raises TransientError if AWS does not show it (yet)."""
        found = self.find_raw()
        if found is None:
            raise TransientError(f'AWS does not show the {self.kind} "{self.name}" yet.')
        return found


class ControlPlane(EksResource):
    """The EKS cluster without machines; creation takes 7 to 12 minutes."""

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
        self.addons: dict[str, str] = {}  # versions of the ready add-ons
        self.remove_command = f"aws eks delete-cluster --region {aws.region} --name {self.name}"

    def find_raw(self) -> dict[str, Any] | None:
        """AWS' description of the cluster; None if it does not exist."""
        return find_raw_cluster(self.aws, self.name)

    def create(self) -> None:
        """Request the cluster with API access entries, standard support only, and without default add-ons."""
        network = self.stack.network()
        access: dict[str, Any] = {"subnetIds": list(network.subnets.values())[:2]}
        access |= {"endpointPublicAccess": True, "endpointPrivateAccess": True}
        if self.allowed:
            access["publicAccessCidrs"] = list(self.allowed)
        version = version_for(self.aws, self.version)
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
            tags=ownership_tags(self.cluster),
            clientRequestToken=self.token,
            **({"version": version} if version else {}),
        )

    def poll(self) -> Readiness:
        """Ready when ACTIVE. Raises with AWS' issues if the creation has failed."""
        found = self.require_raw()
        if found["status"] == "ACTIVE":
            return Readiness(True)
        if found["status"] == "FAILED":
            raise error_from_issues(found, f"The EKS cluster {self.name} was not created")
        return Readiness(False, f"its control plane is {found['status']}")

    def remove(self) -> None:
        """Send the delete call. Raises NotFoundError if the cluster does not exist."""
        self.aws.call("eks", "delete_cluster", name=self.name)

    def find_flaw(self, described: dict[str, Any]) -> str | None:
        """The issues of a cluster whose creation failed; None if it did not fail."""
        return _issues(described) or "FAILED" if described["status"] == "FAILED" else None

    def find_difference(self, described: dict[str, Any]) -> str | None:
        """The cluster's version of Kubernetes, if it differs from the requested one."""
        if self.version and described.get("version") != self.version:
            return f"it has Kubernetes {described.get('version')}, not {self.version}"
        return None

    def access(self) -> Access:
        """Connect to the cluster's API with a token of the caller's AWS identity."""
        return access_to(self.aws, self.name)


class AddOn(EksResource):
    """A part of Kubernetes installed by EKS and deleted with `goes_with`."""

    kind = "add-on"
    create_seconds = 1200.0

    def __init__(
        self,
        plane: ControlPlane,
        addon: str,
        needs: tuple[Resource, ...] = (),
        *,
        account: str | None = None,
        plain: bool = False,
    ) -> None:
        """`account`: the service account that gets the stack's role for volumes. `plain`: without mlbench's
        settings."""
        super().__init__(plane.cluster, plane.aws)
        self.addon = addon
        self.account = account
        self.settings = None if plain else SETTINGS.get(addon)
        self.name = f"{plane.name}/{addon}"
        self.plane = plane
        self.needs = needs or (plane,)
        # Deleted with its machines, which are deleted before the control plane.
        self.goes_with = self.needs[-1]
        self.remove_command = (
            f"aws eks delete-addon --region {self.aws.region} --cluster-name {plane.name} --addon-name {addon}"
        )

    def find_raw(self) -> dict[str, Any] | None:
        """Describe the add-on in AWS' own fields; None if it is not installed."""
        names = {"clusterName": self.plane.name, "addonName": self.addon}
        addon: dict[str, Any] | None = self.aws.find("eks", "describe_addon", "addon", **names)
        return addon

    def create(self) -> None:
        """Request the add-on with `SETTINGS`, overwriting existing objects with its names."""
        settings: dict[str, Any] = {"configurationValues": self.settings} if self.settings else {}
        if self.account and (role := self.plane.stack.network().volume_role):
            settings["podIdentityAssociations"] = [{"serviceAccount": self.account, "roleArn": role}]
        if version := self._choose_version():
            settings["addonVersion"] = version
        self.aws.call(
            "eks",
            "create_addon",
            clusterName=self.plane.name,
            addonName=self.addon,
            resolveConflicts="OVERWRITE",
            tags=ownership_tags(self.cluster),
            clientRequestToken=self.token,
            **settings,
        )

    def poll(self) -> Readiness:
        """Ready when ACTIVE; DEGRADED until its pods run. Raises with AWS' issues if the creation failed."""
        found = self.require_raw()
        if found["status"] == "ACTIVE":
            self.plane.addons[self.addon] = str(found.get("addonVersion") or "")
            return Readiness(True, facts={"addons": dict(self.plane.addons)})
        if found["status"] == "CREATE_FAILED":
            raise error_from_issues(found, f"The add-on {self.name} was not created")
        return Readiness(False, _issues(found) or f"it is {found['status']}")  # DEGRADED, until its pods run

    def _choose_version(self) -> str | None:
        """The pinned version if EKS offers it, else EKS' default for the cluster's Kubernetes; None: EKS chooses."""
        version = (self.plane.find_raw() or {}).get("version")
        if not version:
            return None
        try:
            answer = self.aws.call("eks", "describe_addon_versions", addonName=self.addon, kubernetesVersion=version)
        except CredentialError:  # a permission that earlier versions of mlbench did not need
            return None
        offered = {item["addonVersion"]: item for group in answer["addons"] for item in group["addonVersions"]}
        known = find_pin("eks", self.addon, str(version))
        if known in offered:
            return known
        defaults = [
            name for name, item in offered.items() if any(fit.get("defaultVersion") for fit in item["compatibilities"])
        ]
        return defaults[0] if defaults else None

    def remove(self) -> None:
        """Send the delete call. Raises NotFoundError if the add-on is not installed."""
        self.aws.call("eks", "delete_addon", clusterName=self.plane.name, addonName=self.addon)


class Admin(Part):
    """Another principal with administrator access to the cluster."""

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

    def find(self) -> ResourceStatus | None:
        """Find the administrator policy among the principal's policies on the cluster."""
        try:
            policies = self.aws.pages(
                "eks", "list_associated_access_policies", "associatedAccessPolicies", **self._named
            )
        except NotFoundError:
            return None
        return (
            ResourceStatus("there")
            if any(item["policyArn"] == admin_policy(self.aws.region) for item in policies)
            else None
        )

    def create(self) -> None:
        """Create the access entry, unless it exists, and associate the administrator policy with it."""
        try:
            self.aws.call(
                "eks",
                "create_access_entry",
                **self._named,
                tags=ownership_tags(self.plane.cluster),
                clientRequestToken=self.token,
            )
        except UsageError as error:
            if not str(error.details.get("aws", "")).startswith("ResourceInUse"):
                raise  # it exists, perhaps without its policy
        scope = {"type": "cluster"}
        self.aws.call(
            "eks", "associate_access_policy", **self._named, policyArn=admin_policy(self.aws.region), accessScope=scope
        )


# --- access ------------------------------------------------------------------------------------------------


def find_raw_cluster(aws: Aws, name: str) -> dict[str, Any] | None:
    """Describe the EKS cluster of that name in AWS' own fields; None if it does not exist."""
    cluster: dict[str, Any] | None = aws.find("eks", "describe_cluster", "cluster", name=name)
    return cluster


def access_to(aws: Aws, name: str) -> Access:
    """Access to the cluster's API: endpoint and CA from EKS, tokens signed in this process."""
    found = find_raw_cluster(aws, name)
    if found is None:
        raise NotFoundError(
            f'There is no EKS cluster "{name}" in {aws.region}.',
            hint=f"mlbench delete-cluster eks {name}   removes any leftovers",
        )
    if found["status"] not in ("ACTIVE", "UPDATING"):
        raise NotFoundError(
            f'The EKS cluster "{name}" cannot be reached: it is {found["status"]}.',
            hint=f"mlbench delete-cluster eks {name}, or repeat the create-cluster command",
        )
    ca = base64.b64decode(found["certificateAuthority"]["data"])
    return Access(found["endpoint"], ca=ca, token=Token(lambda: (sign_token(aws, name), time.time() + TOKEN_SECONDS)))


def sign_token(aws: Aws, name: str) -> str:
    """A token for the Kubernetes API: a signed request to STS, which the API server sends to identify the caller.

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


def error_from_issues(described: dict[str, Any], what: str, region: str = "REGION") -> MlbenchError:
    """The error for a resource that EKS reports as unhealthy, from its first issue."""
    issues = (described.get("health") or {}).get("issues") or [{}]
    said = str(issues[0].get("message") or described["status"])
    return error_from_message(str(issues[0].get("code") or described["status"]), f'{what}: "{said}"', said, region)


# Causes of machines that do not start or join, other than lack of capacity or quota: message in an activity of the auto
# scaling group or in an EKS issue, error class, and next step. {region} is replaced. Sources: EC2 Auto Scaling's user
# guide ("Troubleshoot"), EKS' user guide, reports of karpenter and eksctl.
LAUNCH_CAUSES: tuple[Cause, ...] = (
    (
        re.compile(r"ServiceLinkedRoleCreationNotPermitted"),
        CredentialError,
        "The account has no role for spot machines, and you are not allowed to create it: aws iam "
        "create-service-linked-role "
        "--aws-service-name spot.amazonaws.com",
    ),
    (
        re.compile(r"InvalidKMSKey|KMSKey|Client\.InternalError|Client error on launch"),
        CredentialError,
        "EC2 cannot use the KMS key that the account encrypts disks with: let AWSServiceRoleForAutoScaling use it in "
        "the key's policy; aws ec2 get-ebs-default-kms-key-id --region {region}   shows the key",
    ),
    (
        re.compile(r"InsufficientFreeAddresses|not enough free addresses|insufficient free addresses"),
        CapacityError,
        "The subnet has no free addresses: use fewer workers, or another --zone. aws ec2 describe-subnets --region "
        "{region}   shows how many are free",
    ),
    (
        re.compile(r"SpotMaxPriceTooLow|Spot request price"),
        CapacityError,
        "The spot price is above the bid: remove --spot, or use another --zone or --machine-type.",
    ),
    (
        re.compile(r"PendingVerification"),
        CredentialError,
        "AWS is verifying the account for this region, which takes up to four hours: repeat the command later.",
    ),
    (
        re.compile(r"\bBlocked\b|currently blocked|maximum Fleet Requests"),
        CredentialError,
        "AWS does not let the account start machines until it has verified it; its owner can request that at "
        "https://support.console.aws.amazon.com, service Account, category Account Verification.",
    ),
    (
        re.compile(r"not eligible for Free Tier"),
        UsageError,
        "The account has AWS's free plan, which has no GPUs and few machine types: its owner can upgrade it under "
        "Billing; or use a --machine-type that aws ec2 describe-instance-types --region {region} --filters "
        "Name=free-tier-eligible,Values=true   lists.",
    ),
    (
        re.compile(r"OptInRequired"),
        CredentialError,
        "The account is not subscribed to the service, or the region is not enabled: aws account enable-region "
        "--region-name {region}; or use another --region",
    ),
    (
        re.compile(r"failed to join|NodeCreationFailure|Unhealthy nodes"),
        NeverStartedError,
        "Machines must reach the cluster's API, EC2 and ECR: check that VPC Block Public Access is off (aws ec2 "
        "describe-vpc-block-public-access-options --region {region}), and organization policies on public addresses.",
    ),
    (re.compile(r"\bUnsupported\b"), UsageError, "Choose another --zone or --machine-type."),
)


def error_from_cause(message: str, said: str, region: str) -> MlbenchError | None:
    """The error for a launch with a known cause of failure; None for other messages."""
    return error_from_causes(LAUNCH_CAUSES, message, said, region=region)


def error_from_message(code: str, message: str, said: str, region: str = "REGION") -> MlbenchError:
    """The error for an EKS message that quotes EC2 or IAM: classified by its text, then by the quoted code."""
    if known := error_from_cause(message, f"{code}: {said}", region):
        return known
    quoted = re.search(r"\b([A-Z]\w+(?:\.\w+)*) - ", said)
    if quoted:
        error = error_from_code(quoted[1], message, said)
        if type(error) is not MlbenchError and not isinstance(error, TransientError):
            return error
    inner = (
        (
            "InsufficientInstanceCapacity",
            (
                *("InsufficientInstanceCapacity", "UnfulfillableCapacity", "no Spot capacity"),
                *("do not have sufficient", "capacity-not-available", "ReservationCapacityExceeded"),
            ),
        ),
        (
            "VcpuLimitExceeded",
            ("VcpuLimitExceeded", "vCPU limit", "MaxSpotInstanceCountExceeded", "InstanceLimitExceeded"),
        ),
        ("UnauthorizedOperation", ("UnauthorizedOperation", "not authorized")),
    )
    for meant, phrases in inner:
        if code == meant or any(phrase in said for phrase in phrases):
            return error_from_code(meant, message, said)
    return error_from_code(code, f"{message} ({code})", said)


def _issues(described: dict[str, Any]) -> str | None:
    issues = (described.get("health") or {}).get("issues") or []
    return "; ".join(f"{item.get('code')}: {item.get('message')}" for item in issues) or None
