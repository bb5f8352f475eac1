"""EKS without a cloud: machines and their GPUs, wrong options, AWS' words as errors, the template, what is rendered."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import ExistsError, NoAnswerError, RightsError, TransientError
from providers.eks.api import error_from_code, map_cloud_errors
from providers.eks.options import GPU_MACHINES, EksOptions, choose_machine, equivalent_types, find_machine
from providers.eks.provider import EksProvider
from providers.pins import require_pin

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")


def describe_cluster(**options: Any) -> dict[str, Any]:
    return dict(EksProvider().new_cluster("demo-2", 2, EksOptions(**options)).details)


# --- machines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "gpus", "gpu", "expected"),
    [
        (None, None, None, "m5.xlarge"),
        (None, 0, None, "m5.xlarge"),
        (None, 1, None, "g4dn.xlarge"),
        (None, 4, "A10G", "g5.12xlarge"),
        (None, None, "nvidia-tesla-v100", "p3.2xlarge"),
        (None, None, "H200", "p5e.48xlarge"),
        (None, None, "H100", "p5.4xlarge"),
        (None, 8, "H100", "p5.48xlarge"),
        ("g5.xlarge", 1, "a10g", "g5.xlarge"),
        ("c7i.large", 0, None, "c7i.large"),
        ("p4d.24xlarge", None, None, "p4d.24xlarge"),
    ],
)
def test_machine_for_options(machine: str | None, gpus: int | None, gpu: str | None, expected: str) -> None:
    assert choose_machine(machine, gpus, gpu).name == expected


@pytest.mark.parametrize(
    ("machine", "gpus", "gpu", "message", "hint"),
    [
        ("g4dn.xlarge", 4, None, "has 1 × T4, not 4", "g4dn.12xlarge"),
        ("g4dn.xlarge", 0, None, "sold whole", "Leave out --num-gpus"),
        ("m5.xlarge", 1, None, "has no GPU, not 1", "Leave out"),
        ("m5.xlarge", None, "T4", "has no GPU, not T4", "g4dn.xlarge"),
        ("g5.xlarge", None, "T4", "has A10G, not T4", "g4dn.xlarge"),
        (None, 3, "T4", "No machine has 3 × T4", "g4dn.12xlarge (4)"),
        (None, 1, "T5", 'has no GPU "T5". Did you mean "t4"?', "A10G"),
        (None, -1, None, "the minimum is 0", ""),
        ("g5", None, None, "is not an instance type", "g5.xlarge"),
        ("c7g.xlarge", None, None, "is an ARM machine", "m5.xlarge"),
        ("trn1.32xlarge", None, None, "has no NVIDIA GPUs", "--gpu-type"),
    ],
)
def test_wrong_machines(machine: str | None, gpus: int | None, gpu: str | None, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_machine(machine, gpus, gpu)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_what_stands_in_has_the_same_gpus() -> None:
    for name, machine in GPU_MACHINES.items():
        others = [find_machine(other) for other in equivalent_types(machine)]
        assert others[0].name == name
        assert {(other.gpu, other.gpus) for other in others} == {(machine.gpu, machine.gpus)}
    assert set(equivalent_types(find_machine("g4dn.xlarge"))) >= {"g4dn.xlarge", "g4dn.2xlarge"}


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_cpus": 64}, "has 4 vCPUs, not 64"),
        ({"disk_size": 5}, "from 20 to"),
        ({"kubernetes_version": "latest"}, "form X.Y"),
        ({"kubernetes_version": "1.34.2"}, "form X.Y"),
        ({"zone": "eu-west-1"}, "not the name of a zone"),
        ({"zone": "eu-west-1a", "region": "us-east-1"}, "not in the region"),
        ({"region": "eu-wets-1"}, 'Did you mean "eu-west-1"?'),
        ({"efa": True}, "no EFA network interface"),
        ({"spot_type": ("g5.xlarge",)}, "needs --spot"),
        ({"machine_type": "g4dn.xlarge", "spot": True, "spot_type": ("g5.xlarge",)}, "cannot replace"),
        ({"machine_type": "p4d.24xlarge", "spot": True, "efa": True, "spot_type": ("p4de.24xlarge",)}, "a single type"),
        ({"system_machine_type": "g5.xlarge"}, "need no GPU"),
        ({"admin": ("me",)}, "not the ARN"),
        ({"tag": ("AWS:cost=1",)}, "such names are reserved"),
        ({"node_image": "botlerocket"}, 'Did you mean "bottlerocket"?'),
        ({"allow_from": ("10.0.0.1/8",)}, "host bits set"),
    ],
)
def test_wrong_options_are_refused_before_any_call(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?").replace(".", r"\.")):
        describe_cluster(**options)


def test_the_zone_tells_the_region() -> None:
    assert describe_cluster(zone="us-west-2b")["region"] == "us-west-2"
    assert describe_cluster()["region"] == "eu-west-1"


def test_machines_that_todays_images_cannot_use_are_refused() -> None:
    by_name = [EksOptions(machine_type=name) for name in ("p3.2xlarge", "p2.xlarge", "g3s.xlarge")]
    for options in (*by_name, EksOptions(gpu_type="V100")):
        with pytest.raises(UsageError, match="too old for the CUDA") as caught:
            EksProvider().new_cluster("old-2", 2, options)
        assert "V100" not in (caught.value.hint or "")
    # One that exists can still be deleted.
    old = Cluster("old-2", "eks", details={"nodes": 2, "options": {"machine_type": "p3.2xlarge"}}, location="eu-west-1")
    assert EksProvider().resources(old)


def test_every_resource_stands_behind_what_it_needs() -> None:
    provider = EksProvider()
    resources = provider.resources(provider.new_cluster("demo-2", 2, EksOptions(machine_type="p4d.24xlarge", efa=True)))
    for number, resource in enumerate(resources):
        assert all(any(need is before for before in resources[:number]) for need in resource.needs)
        assert resource.remove_command or resource.goes_with


# --- AWS' words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        ("Throttling", "Rate exceeded", TransientError),
        ("RequestLimitExceeded", "Request limit exceeded.", TransientError),
        ("InternalFailure", "", TransientError),
        (
            "InvalidParameterException",
            "Role with arn: x, could not be assumed because",
            TransientError,
        ),
        ("ExpiredTokenException", "", CredentialError),
        ("SignatureDoesNotMatch", "Signature expired: 2026", CredentialError),
        ("InvalidSignatureException", "Signature not yet current: 2026", CredentialError),
        ("AccessDeniedException", "", RightsError),
        ("UnauthorizedOperation", "", RightsError),
        ("OptInRequired", "", RightsError),
        ("LimitExceeded", "", CapacityError),
        ("InsufficientInstanceCapacity", "", CapacityError),
        ("MaxSpotInstanceCountExceeded", "", CapacityError),
        ("ServiceQuotaExceededException", "", CapacityError),
        ("ResourceNotFoundException", "No cluster found", NotFoundError),
        ("InvalidVpcID.NotFound", "", NotFoundError),
        ("InvalidPlacementGroup.Unknown", "", NotFoundError),
        ("ValidationError", "Stack with id x does not exist", NotFoundError),
        ("ValidationError", "Template format error", UsageError),
        ("InvalidParameterException", "Subnets are wrong", UsageError),
        ("UnsupportedAvailabilityZoneException", "", UsageError),
        ("DependencyViolation", "", UsageError),
        ("RequestExpired", "Request has expired.", CredentialError),
        ("ForbiddenException", "No access", RightsError),  # of IAM Identity Center
        ("ResourcePropagationDelayException", "", TransientError),
        ("AlreadyExistsException", "", ExistsError),
        ("NeverSeenBefore", "", MlbenchError),
    ],
)
def test_codes(code: str, said: str, kind: type[MlbenchError]) -> None:
    assert type(error_from_code(code, "message", said)) is kind


@pytest.mark.parametrize(
    ("code", "words", "kind", "hint"),
    [
        ("InvalidRequestException", "Failed to create service linked role: AWSServiceRoleForAmazonEKSNodegroup",
         CredentialError, "create-service-linked-role --aws-service-name eks-nodegroup.amazonaws.com"),
        ("Ec2SubnetInvalidConfiguration", "One or more Amazon EC2 Subnets of [subnet-1] does not automatically assign "
         "public IP addresses; Ec2SubnetInvalidConfiguration", UsageError, "--map-public-ip"),
        ("TagPolicyViolation", "The tag policy does not allow the specified value for the following tag key: 'Team'.",
         UsageError, "--tag NAME=VALUE"),
        ("UnauthorizedOperation", "You are not authorized to perform: ec2:RunInstances with an explicit deny in a "
         "service control policy", RightsError, "--tag NAME=VALUE"),
    ],
)  # fmt: skip
def test_the_cause_is_told_from_the_words(code: str, words: str, kind: type[MlbenchError], hint: str) -> None:
    error = error_from_code(code, words, words)
    assert type(error) is kind
    assert hint in str(error.hint)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.NoCredentialsError(), CredentialError),
        (exceptions.PartialCredentialsError(provider="env", cred_var="aws_secret_access_key"), CredentialError),
        (exceptions.ProfileNotFound(profile="x"), CredentialError),
        (exceptions.NoAuthTokenError(), CredentialError),
        (exceptions.EndpointConnectionError(endpoint_url="https://eks"), NoAnswerError),
        (exceptions.ReadTimeoutError(endpoint_url="https://eks"), NoAnswerError),
        (exceptions.ConnectionClosedError(endpoint_url="https://eks"), NoAnswerError),
        (exceptions.ParamValidationError(report="no"), UsageError),
    ],
)
def test_what_the_library_raises(error: Exception, kind: type[MlbenchError]) -> None:
    made = map_cloud_errors(error, "eks describe-cluster", "eu-west-1")
    assert type(made) is kind
    assert isinstance(made, MlbenchError)
    assert made.hint or kind is UsageError


# --- templates ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_templates_are_clean() -> None:
    program = [str(Path(sys.executable).with_name("cfn-lint")), "--include-checks", "I", "--"]
    templates = sorted(map(str, (ROOT / "providers/eks").glob("*.yaml")))
    done = subprocess.run([*program, *templates], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("nvidia", "nvcr.io/nvidia/k8s-device-plugin"),
        ("efa", "602401143452.dkr.ecr.us-west-2.amazonaws.com/eks/aws-efa-k8s-device-plugin"),
    ],
)
def test_a_device_plugin_goes_where_the_devices_are(name: str, image: str) -> None:
    from templates import documents

    (manifest,) = documents(
        f"kubernetes/{name}-device-plugin.yaml", {"image": require_pin("devices", f"{name}-device-plugin")}
    )
    pod = manifest["spec"]["template"]["spec"]
    provider = EksProvider()
    options = EksOptions(machine_type="g5.8xlarge", efa=True)
    system, workers = provider.groups(provider.new_cluster("demo-2", 2, options))
    assert pod["nodeSelector"].items() <= workers.labels.items()
    assert not pod["nodeSelector"].items() <= system.labels.items()
    assert {taint["Key"] for taint in workers.taints} <= {item["key"] for item in pod["tolerations"]}
    found, _, version = pod["containers"][0]["image"].rpartition(":")
    assert found == image
    assert version.startswith("v0.")


def test_the_token_is_a_signed_question_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    from providers.eks.api import Aws, session, sign_token
    from tests.fakes.aws_kube import refusal_of

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-shown")
    session.cache_clear()
    token = sign_token(Aws("eu-west-1"), "demo-2")
    assert refusal_of(f"Bearer {token}", "demo-2", "never-shown") is None
    assert refusal_of(f"Bearer {token}", "demo-3", "never-shown") == "the token's signature is wrong"
    assert refusal_of(f"Bearer {token}", "demo-2", "another") == "the token's signature is wrong"
    assert "never-shown" not in token
    assert refusal_of("Bearer something", "demo-2") is not None
    session.cache_clear()
