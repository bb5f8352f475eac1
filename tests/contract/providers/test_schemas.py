"""What mlbench applies on clusters is valid, without unknown fields, in every Kubernetes that clouds offer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.model.run import Cluster
from providers import registry
from providers.kubernetes_calls import ClusterObjects
from tests.needs import needs

ROOT = Path(__file__).parents[3]
VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gke", {"machine_type": "a3-highgpu-8g", "fast_network": True, "zone": "us-central1-a", "project": "lab"}),
    (
        "gke",
        {
            "machine_type": "a3-ultragpu-8g",
            "fast_network": True,
            "zone": "us-central1-a",
            "project": "lab",
            "spot": True,
        },
    ),
    ("eks", {"machine_type": "p4d.24xlarge", "efa": True, "region": "us-east-1"}),
    (
        "aks",
        {
            "gpu_type": "t4",
            "spot": True,
            "region": "westeurope",
            "subscription": "0a1b2c3d-0000-4000-8000-000000000000",
        },
    ),
)


def objects() -> Iterator[tuple[str, Any]]:
    """Those of runs, as the golden files have them, and those of clusters with GPUs and an end."""
    import yaml

    for path in sorted((ROOT / "tests/unit/engines/kubernetes/golden").glob("*.yaml")):
        yield from ((path.name, document) for document in yaml.safe_load_all(Path(path).read_text("utf-8")))
    for cloud, options in FORMS:
        provider = registry.load(cloud)
        assert provider.options is not None
        cluster: Cluster = provider.new_cluster("valid-2", 2, provider.options(**options))
        cluster = replace(cluster, details={**cluster.details, "expires": 1900000000})
        for resource in provider.resources(cluster):
            if isinstance(resource, ClusterObjects):
                yield from ((f"{cloud} {resource.kind}", document) for document in resource.documents())


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_applied_is_valid(version: str) -> None:
    judge = needs("kubernetes_validate")
    found = [item for item in objects() if "gke.io" not in item[1]["apiVersion"]]  # GKE's own kinds have no schema
    assert len({name for name, _ in found}) >= 7
    wrong = {}
    for name, document in found:
        try:
            judge.validate(document, version, strict=True)
        except judge.ValidationError as error:
            wrong[f"{name} {document['kind']}"] = error.message
    assert wrong == {}
