"""Every object that a run submits, held against the official client's models: no field that the API does not know."""

from pathlib import Path
from typing import Any

import pytest
import yaml

GOLDEN = Path(__file__).parent / "golden"


def through_the_model(document: dict[str, Any]) -> Any:
    """The document as the official client would send it: what its models do not know is gone."""
    from kubernetes import client  # a second of a core

    model = getattr(client, f"V1{document['kind']}")
    return client.ApiClient().sanitize_for_serialization(model.from_dict(document))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_official_models_know_every_field(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert through_the_model(document) == document


def test_an_unknown_field_would_be_seen() -> None:
    job = next(yaml.safe_load_all((GOLDEN / "plain.yaml").read_text()))
    job["spec"]["backofLimit"] = 0
    assert through_the_model(job) != job
