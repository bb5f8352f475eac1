"""The objects of a run: byte-stable, valid, allowed where Pod Security is restricted, and refused early if wrong."""

import base64
import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

import templates
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.kubernetes.manifests import SPEC_ANNOTATION, holders, manifests, spec_of
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from task_images.methods.catalog import describe, find_class
from tests.needs import needs

GOLDEN = Path(__file__).parent / "golden"

Object = dict[str, Any]  # of Kubernetes
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def a_spec(**changes: Any) -> RunSpec:
    fields: Object = {
        "name": "demo-2",
        "cluster": "c",
        "engine": "kubernetes",
        "task": "custom",
        "preset": "custom",
        "argv": ("python", "train.py", "--rank={rank}", "$HOME and $(date)"),
        "backend": "gloo",
        "workers": 2,
        "image": "example.com/image:1",
    }
    return RunSpec(**{**fields, **changes})


FULL = a_spec(
    workers=3,
    processes_per_worker=2,
    run_on_all=False,
    parameters={"text": 'a "quoted" ☃ \u2028 \x7f $(X)', "rate": 0.1},
    device="gpu",
    gpus_per_worker=2,
    cpus=4.0,
    timeout=600.5,
    data_dir="/data",
    env={"LEVEL": "debug $(date)", "RANK": "99", "MLBENCH_RUN_ID": "other"},
    kubernetes=KubernetesOptions(
        namespace="team",
        memory="8Gi",
        shm="2Gi",
        node_selector={"pool": "a"},
        tolerations=("dedicated=bench:NoSchedule", "spot"),
        pull_secret="login",
        queue="batch",
        collect="all",
        data_claim="datasets",
        spread=False,
        devices={"vpc.amazonaws.com/efa": "4"},
    ),
    price={"per_hour": 1.5, "currency": "USD", "source": "a table"},
)


def render_text(spec: RunSpec) -> str:
    """As `--dry-run` prints it, but for the scripts, which have tests of their own."""
    documents = KubernetesEngine(Access("https://nowhere.invalid", "default")).render(spec).documents
    scripts, packed = documents[1]["data"], documents[1]["binaryData"]
    assert scripts == {name: (templates.FOLDER / "kubernetes" / name).read_text() for name in scripts}
    config = {**documents[1], "data": dict.fromkeys(scripts, "..."), "binaryData": dict.fromkeys(packed, "...")}
    digest = hashlib.sha256(base64.b64decode(packed["code.tar.gz"])).hexdigest()
    return templates.dump([documents[0], config, *documents[2:]]).replace(digest, "...")


def pod_of(spec: RunSpec) -> Object:
    template: Object = manifests(spec, "default")[0]["spec"]["template"]["spec"]
    return template


@pytest.mark.parametrize(("name", "spec"), [("plain", a_spec()), ("full", FULL)])
def test_the_same_spec_gives_the_same_bytes_for_ever(name: str, spec: RunSpec) -> None:
    """Where a change is wanted: delete the golden file, run the test, look at the difference."""
    path = GOLDEN / f"{name}.yaml"
    text = render_text(spec)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert render_text(RunSpec.from_dict(spec.to_dict())) == text


@pytest.mark.parametrize("spec", [a_spec(), FULL])
def test_the_clients_strict_models_take_the_objects(spec: RunSpec) -> None:
    client = needs("kubernetes.client")
    models = [client.V1Job, client.V1ConfigMap, client.V1Service, client.V1NetworkPolicy, client.V1Job]
    documents = manifests(spec, "default")
    assert [document["kind"] for document in documents] == ["Job", "ConfigMap", "Service", "NetworkPolicy", "Job"]
    for model, document in zip(models, documents, strict=True):
        model.model_validate(document)


def test_restricted_pod_security_holds() -> None:
    pod = pod_of(a_spec())
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all({"emptyDir", "configMap"} & set(volume) for volume in pod["volumes"])
    assert "ports" not in container


def head_of(spec: RunSpec) -> Object:
    return manifests(spec, "default")[4]


def test_the_heads_time_is_limited_by_the_cluster() -> None:
    spec = a_spec(timeout=600.0, kubernetes=KubernetesOptions(keep_seconds=1000))
    job, head = manifests(spec, "default")[0]["spec"], head_of(spec)["spec"]
    assert head["activeDeadlineSeconds"] == job["activeDeadlineSeconds"] + 1000
    assert job["ttlSecondsAfterFinished"] > 1000
    week = KubernetesOptions(keep_seconds=8 * 86400)
    assert manifests(a_spec(kubernetes=week), "default")[0]["spec"]["ttlSecondsAfterFinished"] > 8 * 86400


def test_the_pods_get_the_code_and_the_plan_of_their_agents() -> None:
    late = KubernetesOptions(start_timeout=7200)
    config = manifests(a_served_spec(env={"OMPI_MCA_btl": "tcp", "RANK": "9"}, kubernetes=late), "default")[1]
    assert list(config["data"]) == ["start.sh"]
    plan = json.loads(gzip.decompress(base64.b64decode(config["binaryData"]["plan.json.gz"])))
    # What the user says stays, although it looks like a launcher's; the contract goes first.
    assert plan["environment"]["OMPI_MCA_btl"] == "tcp"
    assert plan["meeting_seconds"] > 7200
    assert [rank["environment"]["RANK"] for rank in plan["nodes"][1]["ranks"]] == ["2", "3", "5"]
    assert [node["name"] for node in plan["nodes"]] == ["demo-2-0.demo-2", "demo-2-1.demo-2"]
    assert [[rank["rank"] for rank in node["ranks"]] for node in plan["nodes"]] == [[0, 1, 4], [2, 3, 5]]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(config["binaryData"]["code.tar.gz"]))) as code:
        assert {"mlbench_cli/agent/pod.py", "task_images/contract.py"} <= set(code.getnames())


def test_workers_keep_off_nodes_that_they_would_share() -> None:
    def terms(**options: Any) -> list[Object]:
        affinity = pod_of(a_spec(kubernetes=KubernetesOptions(**options))).get("affinity", {})
        found: list[Object] = affinity.get("podAntiAffinity", {}).get(REQUIRED, [])
        return found

    workers = {"app.kubernetes.io/managed-by": "mlbench", "mlbench/role": "worker"}
    (everybody,) = terms()
    assert everybody["labelSelector"] == {"matchLabels": workers}
    assert everybody["namespaceSelector"] == {}
    (others,) = terms(spread=False)
    different = {"key": "mlbench/run", "operator": "NotIn", "values": ["demo-2"]}
    assert others["labelSelector"] == {"matchLabels": workers, "matchExpressions": [different]}
    (own,) = terms(share_nodes=True)
    # The head bears the run's label, too, and must not keep a worker from its node.
    assert own["labelSelector"] == {"matchLabels": {**workers, "mlbench/run": "demo-2"}}
    assert terms(spread=False, share_nodes=True) == []


def test_a_pod_does_not_grow_with_the_number_of_workers() -> None:
    """With the names of all, 4 096 pods took 428 MB of the cluster's own store."""
    sizes = [
        len(json.dumps(manifests(a_spec(workers=workers), "default")[0]["spec"]["template"])) for workers in (8, 4096)
    ]
    assert sizes[1] - sizes[0] < 100


def test_the_job_says_which_run_it_is() -> None:
    job = manifests(FULL, "default")[0]
    assert spec_of(job) == FULL
    assert job["metadata"]["namespace"] == "team"
    with pytest.raises(UsageError, match="does not name its run"):
        spec_of({"metadata": {"name": "x", "annotations": {SPEC_ANNOTATION: "{"}}})


def test_who_holds() -> None:
    every = KubernetesOptions(collect="all")
    assert holders(a_spec()) == (0,)
    assert holders(a_spec(kubernetes=every)) == (0, 1)
    assert holders(a_spec(kubernetes=every, run_on_all=False)) == (0,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, "no container image"),
        ({"kubernetes": KubernetesOptions(tolerations=("a:b:c",))}, "toleration"),
        ({"argv": ("x" * 300_000,)}, "too long"),
        ({"name": "a" * 36, "workers": 4000}, "host names of 4000 workers"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_here(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        manifests(a_spec(**changes), "default")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "much"}, "--memory"),
        ({"shm": "1 Gi"}, "--shm"),
        ({"keep_seconds": 31 * 86400}, "the maximum is 30 days"),
        ({"collect": "some"}, "neither rank0 nor all"),
    ],
)
def test_options_that_a_cluster_would_refuse_are_refused_wherever_they_come_from(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        KubernetesOptions(**options)


def test_every_value_survives_the_way_through_yaml() -> None:
    nasty = "'\"\\\n\t: - # {{ x }} {% y %} & * ! | > \u0085\u2028\ufeff\x7f é 𝄞 %@`"
    spec = msgspec.structs.replace(FULL, argv=(nasty,), parameters={nasty: nasty})
    job = manifests(spec, "default")[0]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == [nasty]
    assert spec_of(job) == spec


def a_served_spec(**changes: Any) -> RunSpec:
    return a_spec(method={**describe(find_class("bsp-ps")()), "servers": "2"}, processes_per_worker=2, **changes)


def variables_of(container: Object) -> Object:
    return {item["name"]: item.get("value") for item in container["env"]}


def test_amd_gpus_are_asked_for_by_their_own_name() -> None:
    options = KubernetesOptions(gpu_resource="amd.com/gpu")
    pod = pod_of(a_spec(device="gpu", gpus_per_worker=8, kubernetes=options))
    limits = pod["containers"][0]["resources"]["limits"]
    assert (limits["amd.com/gpu"], "nvidia.com/gpu" in limits) == ("8", False)
    assert {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


# --- what real clusters ask for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fabric", "value"),
    [({"name": "EFA", "gbits": 400}, "400 EFA"), ({"name": "EFA"}, None), ({"gbits": 400}, None), ({}, None)],
)
def test_ranks_know_the_nominal_speed_of_a_fast_network(fabric: dict[str, Any], value: str | None) -> None:
    (container,) = pod_of(a_spec(kubernetes=KubernetesOptions(fabric=fabric)))["containers"]
    assert variables_of(container).get("MLBENCH_FABRIC") == value
