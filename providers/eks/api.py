"""Calls of AWS: one client per service and region, created when first used, and AWS' errors mapped to mlbench's."""

import os
import re
from functools import cache
from typing import Any

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError, did_you_mean
from mlbench_cli.kube.tls import explain_connection_failure
from providers.base import NOT_CONFIGURED, Cause, TransientError, call_timeout, error_from_causes

CONNECT_SECONDS = 10.0
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")

LOG_IN = "aws sts get-caller-identity   shows who you are; aws configure or aws sso login gives credentials"
SET_CLOCK = "AWS rejects signatures that are more than five minutes off: set this machine's clock, then repeat."
ASK_RIGHTS = "Ask for that permission, or use another profile: export AWS_PROFILE=NAME"
MORE_QUOTA = "Ask for more: https://console.aws.amazon.com/servicequotas   or use less, or another --region"
ELSEWHERE = "Try --zones a,b,c or another --machine-type, --spot or no --spot, or wait: the same command resumes"

# AWS' error codes -> mlbench's error classes. The first match counts.
CODES: tuple[tuple[str, type[MlbenchError], str | None], ...] = (
    (r"RequestLimitExceeded|Throttl\w*|TooManyRequests\w*|SlowDown|BandwidthLimitExceeded", TransientError, None),
    (r"RequestTimeTooSkewed|RequestExpired", CredentialError, SET_CLOCK),
    (
        r"ExpiredToken\w*|InvalidClientTokenId|UnrecognizedClient\w*|AuthFailure|MissingAuthenticationToken\w*|"
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidSignature\w*|IncompleteSignature\w*",
        CredentialError,
        LOG_IN,
    ),
    (
        r"AccessDenied\w*|UnauthorizedOperation|Unauthorized\w*|OptInRequired|NotAuthorized\w*|PendingVerification|Blocked",
        CredentialError,
        ASK_RIGHTS,
    ),
    # EKS' code for requests for which the caller, or a named role, lacks permission.
    (r"ClientException", CredentialError, ASK_RIGHTS),
    (
        r"InsufficientInstanceCapacity|InsufficientHostCapacity|InsufficientCapacity\w*|UnfulfillableCapacity|"
        r"InsufficientFreeAddresses\w*|SpotMaxPriceTooLow|Ec2InstanceCapacity\w*",
        CapacityError,
        ELSEWHERE,
    ),
    (r"\w*LimitExceeded\w*|\w*QuotaExceeded\w*|MaxSpotInstanceCountExceeded|MaxIOPS\w*", CapacityError, MORE_QUOTA),
    (r"(Resource|Repository|Image)NotFound\w*|NoSuch\w*|\w+\.NotFound\w*|\w+\.Unknown", NotFoundError, None),
    (
        r"DependencyViolation|\w+\.InUse|ResourceInUse\w*|IncorrectState\w*|OperationInProgress\w*|TokenAlreadyExists\w*",
        UsageError,
        None,
    ),
    (r"Server\w*|Service(Unavailable|Failure)\w*|Internal\w*|Unavailable", TransientError, None),
    (r"UnsupportedAvailabilityZone\w*|Unsupported\w*", UsageError, "Choose another --zone or --machine-type"),
    (r"Validation\w*|Invalid\w*|\w+\.Malformed|Malformed\w*|MissingParameter\w*", UsageError, None),
)
CAUSES: tuple[Cause, ...] = (
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
            from botocore.config import Config

            config = Config(
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


@cache
def session() -> Any:
    """boto3's session of this process, with loaded service models (EC2's takes a while)."""
    try:
        import boto3
    except ImportError:
        raise UsageError(
            "Clusters of eks need boto3, which is not installed.", hint=install_hint("eks"), details=NOT_CONFIGURED
        ) from None
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
    region = asked or (from_zone[1] if from_zone else None)
    region = region or next((os.environ[key] for key in REGION_VARIABLES if os.environ.get(key)), ours.region_name)
    if not region:
        raise UsageError(
            "No AWS region given: neither by option, nor in the environment or profile.",
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
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    if isinstance(error, exceptions.ClientError):
        return _refusal(error.response, doing, region)
    words = " ".join(str(error).split())
    if isinstance(error, exceptions.NoCredentialsError):
        return CredentialError("There are no AWS credentials on this machine.", hint=LOG_IN, details=NOT_CONFIGURED)
    if isinstance(
        error,
        (
            exceptions.PartialCredentialsError,
            exceptions.CredentialRetrievalError,
            exceptions.ProfileNotFound,
            exceptions.SSOError,
            exceptions.TokenRetrievalError,
            exceptions.RefreshWithMFAUnsupportedError,
            exceptions.UnauthorizedSSOTokenError,
        ),
    ):
        return CredentialError(f"The AWS credentials cannot be used: {words}", hint=LOG_IN)
    if isinstance(error, (exceptions.HTTPClientError, exceptions.ConnectionError, ResponseParserError)):
        return TransientError(
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
