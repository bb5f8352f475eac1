"""Calls of AWS: one client per service and region, created when first used, and AWS' errors mapped to mlbench's."""

import base64
import os
import re
import time
from functools import cache
from typing import Any

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import (
    CapacityError,
    CredentialError,
    MlbenchError,
    NeverStartedError,
    NotFoundError,
    UsageError,
    did_you_mean,
)
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Token
from mlbench_cli.kube.tls import explain_connection_failure
from providers.base import (
    NOT_CONFIGURED,
    Cause,
    ExistsError,
    NoAnswerError,
    RightsError,
    TransientError,
    call_timeout,
    error_from_causes,
)

CONNECT_SECONDS = 10.0
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")

LOG_IN = "aws sts get-caller-identity   shows who you are; aws configure, aws login or aws sso login gives credentials"
EXPIRED = (
    "Temporary credentials have expired: aws sso login, or aws login, then repeat; or this machine's clock is off."
)
SET_CLOCK = "AWS rejects signatures that are more than five minutes off: set this machine's clock, then repeat."
ASK_RIGHTS = "Ask for that permission, or use another profile: export AWS_PROFILE=NAME"
MORE_QUOTA = "Ask for more: https://console.aws.amazon.com/servicequotas   or use less, or another --region"
ELSEWHERE = "Try --zones a,b,c or another --machine-type, --spot or no --spot, or wait: the same command resumes"

# AWS' error codes -> mlbench's error classes. The first match counts.
CODES: tuple[tuple[str, type[MlbenchError], str | None], ...] = (
    (
        r"RequestLimitExceeded|\w*RateLimit\w*|Throttl\w*|TooManyRequests\w*|SlowDown|BandwidthLimitExceeded|ResourcePropagationDelay\w*|"
        r"Concurrent(?:Modification|TagAccess)\w*|EntityTemporarilyUnmodifiable",
        TransientError,
        None,
    ),
    (r"RequestTimeTooSkewed", CredentialError, SET_CLOCK),
    (r"RequestExpired", CredentialError, EXPIRED),  # EC2's word for both
    (
        r"ExpiredToken\w*|InvalidClientTokenId|UnrecognizedClient\w*|AuthFailure|MissingAuthenticationToken\w*|"
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidSignature\w*|IncompleteSignature\w*",
        CredentialError,
        LOG_IN,
    ),
    (
        r"AccessDenied\w*|UnauthorizedOperation|Unauthorized\w*|Forbidden\w*|OptInRequired|NotAuthorized\w*|"
        r"PendingVerification|Blocked",
        RightsError,
        ASK_RIGHTS,
    ),
    # EKS' code for requests for which the caller, or a named role, lacks permission.
    (r"ClientException", RightsError, ASK_RIGHTS),
    (
        r"InsufficientInstanceCapacity|InsufficientHostCapacity|InsufficientCapacity\w*|UnfulfillableCapacity|"
        r"InsufficientFreeAddresses\w*|SpotMaxPriceTooLow|Ec2InstanceCapacity\w*",
        CapacityError,
        ELSEWHERE,
    ),
    (r"\w*LimitExceeded\w*|\w*QuotaExceeded\w*|MaxSpotInstanceCountExceeded|MaxIOPS\w*", CapacityError, MORE_QUOTA),
    (r"[\w.]*NotFound\w*|NoSuch\w*|\w+\.Unknown", NotFoundError, None),
    (r"\w*AlreadyExists\w*", ExistsError, None),
    (r"DependencyViolation|\w+\.InUse|ResourceInUse\w*|IncorrectState\w*|OperationInProgress\w*", UsageError, None),
    (r"Server\w*|Service(Unavailable|Failure)\w*|Internal\w*|Unavailable", TransientError, None),
    (r"UnsupportedAvailabilityZone\w*|Unsupported\w*", UsageError, "Choose another --zone or --machine-type"),
    (r"Validation\w*|Invalid\w*|\w+\.Malformed|Malformed\w*|MissingParameter\w*", UsageError, None),
)
CAUSES: tuple[Cause, ...] = (
    (
        re.compile(r"explicit deny in a \w+ control policy"),
        RightsError,
        "A policy of the organization denies it to everybody. It may ask for tags (--tag NAME=VALUE) or another "
        "--region; else ask its administrator.",
    ),
    (
        re.compile(r"[Tt]ag policy does not allow"),
        UsageError,
        "The organization allows certain values of this tag only: --tag NAME=VALUE; aws organizations "
        "describe-effective-policy --policy-type TAG_POLICY   shows them",
    ),
    (
        re.compile(r"AWSServiceRoleForAmazonEKSNodegroup|service[- ]linked role .*[Nn]ode ?group"),
        CredentialError,
        "aws iam create-service-linked-role --aws-service-name eks-nodegroup.amazonaws.com   makes it, once for each "
        "account; or ask for the right iam:CreateServiceLinkedRole",
    ),
    (
        re.compile(r"AWSServiceRoleForAmazonEKS\b|service[- ]linked role .*\beks\b"),
        CredentialError,
        "aws iam create-service-linked-role --aws-service-name eks.amazonaws.com   makes it, once for each account",
    ),
    (
        re.compile(r"Ec2SubnetInvalidConfiguration|not automatically assigned public IP|auto-assign public IP"),
        UsageError,
        "The subnet assigns no public addresses: aws ec2 modify-subnet-attribute --subnet-id SUBNET "
        "--map-public-ip-on-launch, or name subnets with a NAT gateway (--subnets)",
    ),
)
YOUNG_ROLE = re.compile(
    r"[Rr]ole .*(could not be assumed|does not exist|not valid|must allow AWS EventBridge Scheduler)"
)
# STS' errors in regions that the account has not enabled, and a region that is always enabled.
OFF_CODES = ("InvalidClientTokenId", "UnrecognizedClientException")
ALWAYS_ON = "us-east-1"
# In the names of botocore's errors about credentials, which become more with each way to log in.
SIGN_IN = re.compile(r"Credential|Profile|SSO|Login|Token|MFA|MetadataRetrieval|InfiniteLoopConfig|ConfigNotFound")
SKEWED = re.compile(r"Signature (expired|not yet current)")


class Aws:
    """AWS in one region, with the environment's credentials."""

    def __init__(self, region: str) -> None:
        self.region = region
        self._clients: dict[str, object] = {}

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """The response to one request. Raises MlbenchError with AWS' message, TransientError if a retry may help."""
        client = self.client(service)
        try:
            answer: dict[str, Any] = getattr(client, operation)(**parameters)
        except Exception as error:
            raise map_cloud_errors(error, f"{service} {operation.replace('_', '-')}", self.region) from None
        return answer

    def find(self, service: str, operation: str, key: str, **parameters: Any) -> Any:
        """The part `key` of an answer; None if AWS has no such thing, or an empty list of them."""
        try:
            return self.call(service, operation, **parameters)[key] or None
        except NotFoundError:
            return None

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        """All items of a paginated response; `key` is the name of the list in each page."""
        client = self.client(service)
        try:
            return [item for page in client.get_paginator(operation).paginate(**parameters) for item in page[key]]
        except Exception as error:
            raise map_cloud_errors(error, f"{service} {operation.replace('_', '-')}", self.region) from None

    def client(self, service: str) -> Any:
        """The client of a service, created at its first use.

        Its timeout is `call_timeout()` seconds. Raises a mapped MlbenchError if credentials or the region cannot be
        used.
        """
        if service not in self._clients:
            config = _load("botocore.config").Config(
                connect_timeout=min(CONNECT_SECONDS, call_timeout()),
                read_timeout=call_timeout(),
                retries={"mode": "standard"},
                user_agent_extra="mlbench",
            )
            try:
                self._clients[service] = session().client(service, region_name=self.region, config=config)
            except Exception as error:
                raise map_cloud_errors(error, service, self.region) from None
        return self._clients[service]


@cache
def aws_in(region: str) -> Aws:
    """AWS in a region, cached with its clients for this process."""
    return Aws(region)


def _load(name: str) -> Any:
    """A module of AWS' libraries. Raises UsageError if they are not installed."""
    return load_library(name, "eks", NOT_CONFIGURED)


@cache
def session() -> Any:
    """boto3's session of this process, with loaded service models (EC2's takes a while)."""
    boto3 = _load("boto3")
    try:
        return boto3.Session()
    except Exception as error:
        raise map_cloud_errors(error, "session", "") from None


def account_of(aws: Aws) -> str:
    """The account number of the current credentials, from STS, for which no permission is needed.

    Raises UsageError for a region that is disabled for the account, where STS rejects valid credentials.
    """
    try:
        return str(aws.call("sts", "get_caller_identity")["Account"])
    except CredentialError as error:
        if error.details.get("aws") not in OFF_CODES or aws.region == ALWAYS_ON:
            raise
        try:
            account = str(aws_in(ALWAYS_ON).call("sts", "get_caller_identity")["Account"])
        except MlbenchError:
            raise error from None
        raise UsageError(
            f"The region {aws.region} is not enabled for the account {account}; the credentials are valid in "
            "other regions.",
            hint=f"aws account enable-region --region-name {aws.region}   switches it on within minutes; or another "
            "--region",
        ) from None


def is_caller(principal: str, caller: str) -> bool:
    """Whether the user or role of IAM is the caller, by the ARN that STS tells: that of a session lacks its role's
    path."""
    session = re.fullmatch(r"arn:[\w-]+:sts::(\d+):assumed-role/([^/]+)/.+", caller)
    if session is None:
        return principal == caller
    return re.fullmatch(rf"arn:[\w-]+:iam::{session[1]}:role/(?:.+/)?{re.escape(session[2])}", principal) is not None


def default_region() -> str | None:
    """The region of the environment or the profile; None without one."""
    return next((os.environ[key] for key in REGION_VARIABLES if os.environ.get(key)), session().region_name)


def region_of(asked: str | None, zone: str | None = None) -> str:
    """The region: as requested, else the zone's, the environment's, or the profile's. Makes no calls."""
    from_zone = re.fullmatch(r"([a-z]{2}(?:-[a-z]+)+-\d+)[a-z]", zone or "")
    if zone and not from_zone:
        raise UsageError(f'--zone "{zone}" is not the name of a zone.', hint="For example: --zone eu-west-1a")
    if asked and from_zone and from_zone[1] != asked:
        raise UsageError(
            f"The zone {zone} is not in the region {asked}.", hint="Remove --region: it follows from the zone."
        )
    ours = session()
    region = asked or (from_zone[1] if from_zone else None) or default_region()
    if not region:
        raise UsageError(
            "No AWS region given, by option, environment or profile.",
            hint="Add --region eu-west-1, or: export AWS_REGION=eu-west-1",
            details=NOT_CONFIGURED,
        )
    known = [name for part in ours.get_available_partitions() for name in ours.get_available_regions("eks", part)]
    if region not in known:
        raise UsageError(
            f'boto3 knows no region "{region}" of EKS.{did_you_mean(region, known)}',
            hint="aws ec2 describe-regions   lists your regions; a new one may need pip install -U boto3",
        )
    return str(region)


def map_cloud_errors(error: Exception, doing: str, region: str) -> Exception:
    """Map an exception of boto3 to mlbench's errors; unexpected exceptions are returned unchanged."""
    exceptions, parsers = _load("botocore.exceptions"), _load("botocore.parsers")
    if isinstance(error, exceptions.ClientError):
        return _refusal(error.response, doing, region)
    words = " ".join(str(error).split())
    if isinstance(error, exceptions.NoCredentialsError):
        return CredentialError("There are no AWS credentials on this machine.", hint=LOG_IN, details=NOT_CONFIGURED)
    if isinstance(error, exceptions.BotoCoreError) and SIGN_IN.search(type(error).__name__):
        return CredentialError(f"The AWS credentials cannot be used: {words}", hint=LOG_IN)
    if isinstance(error, (exceptions.HTTPClientError, exceptions.ConnectionError, parsers.ResponseParserError)):
        return NoAnswerError(
            f"AWS {doing} in {region} returned no usable answer: {words}",
            hint=explain_connection_failure(words)
            or "Check the network and the region, then repeat the command to resume.",
        )
    if isinstance(error, (exceptions.ParamValidationError, exceptions.ConfigParseError, exceptions.BotoCoreError)):
        return UsageError(f"AWS {doing} cannot be reached: {words}")
    return error


def _refusal(response: dict[str, Any], doing: str, region: str) -> MlbenchError:
    error = response.get("Error", {})
    code, said = str(error.get("Code", "?")), str(error.get("Message") or "no message")
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return error_from_code(
        code, f'AWS refused {doing} in {region}: "{said}" ({code}).', said, status, {"aws": code, "request": doing}
    )


def error_from_code(
    code: str, message: str, said: str, status: int = 0, details: dict[str, Any] | None = None
) -> MlbenchError:
    """The error for one of AWS' codes, from a response, a node group's health, or an activity."""
    if SKEWED.search(said):
        return CredentialError(message, hint=SET_CLOCK, details=details)
    if code in ("ValidationError", "ValidationException") and "does not exist" in said:
        return NotFoundError(message, details=details)
    if code in ("InvalidParameterException", "ValidationException") and YOUNG_ROLE.search(said):
        # IAM is eventually consistent: new roles are not visible everywhere at once.
        return TransientError(message, details=details)
    if known := error_from_causes(CAUSES, message, said):
        known.details.update(details or {})
        return known
    for pattern, kind, hint in CODES:
        if re.fullmatch(pattern, code):
            return kind(message, hint=hint, details=details)
    if status >= 500 or status == 429:
        return TransientError(message, details=details)
    return MlbenchError(message, hint="mlbench doctor", details=details)


def tag_list(tags: dict[str, str]) -> list[dict[str, str]]:
    """Tags in the format of EC2 and CloudFormation: a list of `{"Key": …, "Value": …}`."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tags_of(items: list[dict[str, str]] | None) -> dict[str, str]:
    """Tags as a dictionary, from the list that EC2 and CloudFormation return; empty for None."""
    return {item["Key"]: item["Value"] for item in items or []}


# --- causes in the words of EKS and EC2 -------------------------------------------------------------------------------


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
        re.compile(r"targeted availability zone"),
        UsageError,
        "Name two zones where EKS can make control planes: --zones A,B",
    ),
    (
        re.compile(r"maximum number of (VPCs|internet gateways|addresses)"),
        CapacityError,
        f"Delete one that nobody uses, or use an existing network: --subnets subnet-…,subnet-… {MORE_QUOTA}",
    ),
    (re.compile(r"security token included in the request is expired"), CredentialError, EXPIRED),
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
        ("LimitExceeded", ("LimitExceeded", "maximum number of")),
        ("UnauthorizedOperation", ("UnauthorizedOperation", "AccessDenied", "not authorized")),
    )
    for meant, phrases in inner:
        if code == meant or any(phrase in said for phrase in phrases):
            return error_from_code(meant, message, said)
    return error_from_code(code, f"{message} ({code})", said)


# --- access to a cluster's Kubernetes API -----------------------------------------------------------------------------

# The server accepts a token for 15 minutes; Token renews after three quarters of this time.
TOKEN_SECONDS = 13 * 60


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
    client = aws.client("sts")
    credentials = session().get_credentials()
    if credentials is None:
        raise CredentialError("There are no AWS credentials on this machine.", hint="aws configure or aws sso login")
    service = client.meta.service_model.service_id
    signer = _load("botocore.signers").RequestSigner(service, aws.region, "sts", "v4", credentials, session().events)
    request = {
        "method": "GET",
        "url": f"{client.meta.endpoint_url}/?Action=GetCallerIdentity&Version=2011-06-15",
        "body": {},
        "headers": {"x-k8s-aws-id": name},
        "context": {},
    }
    url = signer.generate_presigned_url(request, region_name=aws.region, expires_in=60, operation_name="")
    return "k8s-aws-v1." + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")
