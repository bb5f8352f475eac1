"""The objects of a run: byte-stable, valid, allowed where Pod Security is restricted, and refused early where wrong."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import templates
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.kubernetes.manifests import SPEC_ANNOTATION, holders, manifests, spec_of
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.spec import KubernetesOptions, RunSpec

GOLDEN = Path(__file__).parent / "golden"


def a_spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
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
    kubernetes=KubernetesOptions(
        namespace="team",
        memory="8Gi",
        shm="2Gi",
        node_selector={"pool": "a"},
        tolerations=("dedicated=bench:NoSchedule", "spot"),
        pull_secret="login",
        queue="batch",
        hold_seconds=60,
        collect="all",
        env={"LEVEL": "debug $(date)", "RANK": "99", "MLBENCH_RUN_ID": "other"},
        env_secret="token",
        data_claim="datasets",
        host_network=True,
        spread=False,
        devices={"vpc.amazonaws.com/efa": "4"},
    ),
    price={"per_hour": 1.5, "currency": "USD", "source": "a table"},
)


def rendered(spec: RunSpec) -> str:
    """As `--dry-run` prints it, but for the worker's script, which has tests of its own."""
    documents = KubernetesEngine(Access("https://nowhere.invalid", "default")).render(spec).documents
    script = (templates.FOLDER / "kubernetes/worker.sh").read_text()
    assert documents[1]["data"] == {"worker.sh": script}
    return templates.dump([documents[0], {**documents[1], "data": {"worker.sh": "..."}}, *documents[2:]])


def pod_of(spec: RunSpec) -> dict[str, Any]:
    template: dict[str, Any] = manifests(spec, "default")[0]["spec"]["template"]["spec"]
    return template


@pytest.mark.parametrize(("name", "spec"), [("plain", a_spec()), ("full", FULL)])
def test_the_same_spec_gives_the_same_bytes_for_ever(name: str, spec: RunSpec) -> None:
    """Where a change is wanted: delete the golden file, run the test, look at the difference."""
    path = GOLDEN / f"{name}.yaml"
    text = rendered(spec)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert rendered(RunSpec.from_dict(spec.to_dict())) == text


@pytest.mark.parametrize("spec", [a_spec(), FULL])
def test_the_clients_strict_models_take_the_objects(spec: RunSpec) -> None:
    client = pytest.importorskip("kubernetes.client")
    models = [client.V1Job, client.V1ConfigMap, client.V1Service, client.V1NetworkPolicy]
    documents = manifests(spec, "default")
    assert [document["kind"] for document in documents] == ["Job", "ConfigMap", "Service", "NetworkPolicy"]
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


def test_a_dead_rank_ends_the_run() -> None:
    job = manifests(a_spec(), "default")[0]["spec"]
    assert job["suspend"] is True
    assert (job["backoffLimit"], job["completionMode"], job["completions"], job["parallelism"]) == (0, "Indexed", 2, 2)
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    assert job["activeDeadlineSeconds"] > 2 * a_spec().timeout + a_spec().kubernetes.hold_seconds
    assert job["ttlSecondsAfterFinished"] > job["template"]["spec"]["terminationGracePeriodSeconds"]


def test_what_kubernetes_would_replace_stays_as_it_was_written() -> None:
    (container,) = pod_of(a_spec(parameters={"x": "$(HOME)"}))["containers"]
    assert container["args"][-1] == "$$HOME and $$(date)"
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert environment["MLBENCH_PARAMETERS"] == '{"x":"$$(HOME)"}'


def test_the_contract_is_not_overridden_and_nothing_is_said_twice() -> None:
    (container,) = pod_of(FULL)["containers"]
    names = [item["name"] for item in container["env"]]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert len(names) == len(set(names))
    assert environment["MLBENCH_RUN_ID"] == "demo-2"
    assert environment["MLBENCH_HOSTS"] == "demo-2-0.demo-2,demo-2-1.demo-2,demo-2-2.demo-2"
    assert environment["MASTER_ADDR"] == "demo-2-0.demo-2"
    assert environment["WORLD_SIZE"] == "6"
    assert environment["OMP_NUM_THREADS"] == "2"


def test_gpus_only_when_asked() -> None:
    assert "nvidia" not in rendered(a_spec())
    pod = pod_of(a_spec(device="gpu", gpus_per_worker=2))
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_no_limit_on_the_cpu() -> None:
    resources = pod_of(a_spec(cpus=1.5))["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": "1.5"}, "limits": {}}


def test_the_job_says_which_run_it_is() -> None:
    job = manifests(FULL, "default")[0]
    assert spec_of(job) == FULL
    assert job["metadata"]["namespace"] == "team"
    with pytest.raises(UsageError, match="does not say which run"):
        spec_of({"metadata": {"name": "x", "annotations": {SPEC_ANNOTATION: "{"}}})


def test_who_holds() -> None:
    every = KubernetesOptions(collect="all")
    assert holders(a_spec()) == (0,)
    assert holders(a_spec(kubernetes=every)) == (0, 1)
    assert holders(a_spec(kubernetes=every, run_on_all=False)) == (0,)


def test_a_template_of_the_users_takes_the_place_of_ours(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes/service.yaml.j2").write_text("kind: Service\nmetadata: {name: {{ name | tojson }}}\n")
    spec = a_spec(kubernetes=KubernetesOptions(template_dir=str(tmp_path)))
    assert manifests(spec, "default")[2] == {"kind": "Service", "metadata": {"name": "demo-2"}}
    (tmp_path / "kubernetes/service.yaml.j2").write_text("{{ nothing }}")
    with pytest.raises(UsageError, match=r"service\.yaml\.j2.*nothing"):
        manifests(spec, "default")
    (tmp_path / "kubernetes/service.yaml.j2").write_text("a: [")
    with pytest.raises(UsageError, match="not valid YAML"):
        manifests(spec, "default")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, "no container image"),
        ({"kubernetes": KubernetesOptions(memory="much")}, "--memory"),
        ({"kubernetes": KubernetesOptions(shm="1 Gi")}, "--shm"),
        ({"kubernetes": KubernetesOptions(tolerations=("a:b:c",))}, "toleration"),
        ({"kubernetes": KubernetesOptions(collect="some")}, "neither rank0 nor all"),
        ({"argv": ("x" * 300_000,)}, "too long"),
        ({"name": "a" * 36, "workers": 4000}, "host names of 4000 workers"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_here(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        manifests(a_spec(**changes), "default")


def test_every_value_survives_the_way_through_yaml() -> None:
    nasty = "'\"\\\n\t: - # {{ x }} {% y %} & * ! | > \u0085\u2028\ufeff\x7f é 𝄞 %@`"
    spec = dataclasses.replace(FULL, argv=(nasty,), parameters={nasty: nasty})
    job = manifests(spec, "default")[0]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == [nasty]
    assert spec_of(job) == spec
