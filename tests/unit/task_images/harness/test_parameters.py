"""Parameters of tasks: types, choices and inheritance, as the tool, the documentation and the program see them."""

from dataclasses import dataclass
from typing import Any

import pytest

from task_images.harness.errors import TaskUsageError
from task_images.harness.parameters import read_parameters
from task_images.harness.settings import (
    CheckpointedSettings,
    ClassifierSettings,
    PretrainingSettings,
    Protocol,
    TrainingSettings,
    TranslationSettings,
    describe,
    parameter,
)


@dataclass(frozen=True)
class Base:
    """Two parameters."""

    rate: float = parameter(0.5, "the rate", min=0, max=2)
    kind: str = parameter("a", "the kind", choices=("a", "b"), formerly="type")


@dataclass(frozen=True)
class Own(Base):
    """Another default, and more of them."""

    rate: float = 0.25
    sizes: list[int] = parameter([1, 2], "sizes", kind="sizes")
    words: list[str] = parameter(["a"], "words", choices=("a", "b"))
    is_on: bool = parameter(False, "a switch")
    count: int = parameter(3, "a number", min=1)


def test_a_redefined_parameter_keeps_help_and_range_of_its_base() -> None:
    found = describe(Own)
    assert list(found) == ["rate", "sizes", "words", "is_on", "count", "kind"]
    assert found == {
        "rate": {"type": "float", "min": 0, "max": 2, "help": "the rate", "default": 0.25},
        "sizes": {"type": "sizes", "help": "sizes", "default": [1, 2]},
        "words": {"type": "list", "choices": ("a", "b"), "help": "words", "default": ["a"]},
        "is_on": {"type": "bool", "help": "a switch", "default": False},
        "count": {"type": "int", "min": 1, "help": "a number", "default": 3},
        "kind": {"type": "str", "choices": ("a", "b"), "formerly": "type", "help": "the kind", "default": "a"},
    }


def test_lists_are_not_shared() -> None:
    one, other = Own(), Own()
    one.sizes.append(3)
    assert other.sizes == [1, 2]


@pytest.mark.parametrize(
    ("given", "attribute", "value"),
    [
        ({}, "rate", 0.25),
        ({"rate": 1}, "rate", 1.0),
        ({"rate": 1.5}, "rate", 1.5),
        ({"kind": "b"}, "kind", "b"),
        ({"words": ["b", "a"]}, "words", ["b", "a"]),
        ({"words": []}, "words", []),
        ({"is_on": True}, "is_on", True),
        ({"count": 7}, "count", 7),
        ({"sizes": [4]}, "sizes", [4]),
    ],
)
def test_values_are_read_by_their_type(given: dict[str, Any], attribute: str, value: Any) -> None:
    found = getattr(read_parameters(Own, given), attribute)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"color": 1}, 'there is no parameter "color", only rate, kind, sizes, words, is_on, count'),
        ({"rate": "1"}, "\"rate\" is '1', which is not of type float"),
        ({"rate": True}, '"rate" is True, which is not of type float'),
        ({"count": True}, '"count" is True, which is not of type int'),
        ({"count": 1.0}, '"count" is 1.0, which is not of type int'),
        ({"is_on": 1}, '"is_on" is 1, which is not of type bool'),
        ({"sizes": 1}, '"sizes" is 1, which is not of type list'),
        ({"kind": "c"}, "\"kind\" is 'c', not a or b"),
        ({"words": ["a", "c"]}, "not a or b"),
    ],
)
def test_values_of_another_type_or_choice_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskUsageError) as caught:
        read_parameters(Own, given)
    assert words in str(caught.value)


def test_a_protocol_measures_if_it_has_blocks() -> None:
    assert (Protocol(3, 4, 5).is_on, Protocol(3, 4, 5).total) == (True, 23)
    assert (Protocol(3, 0, 5).is_on, Protocol(3, 0, 5).total) == (False, 3)
    assert Protocol(0, 1, 1).is_on
    settings = TrainingSettings(blocks_after=2, blocks=3, block_updates=4)
    assert settings.protocol == Protocol(2, 3, 4)
    assert not TrainingSettings().protocol.is_on


@pytest.mark.parametrize(
    "settings", [TrainingSettings, PretrainingSettings, ClassifierSettings, CheckpointedSettings, TranslationSettings]
)
def test_defaults_are_within_their_ranges_and_choices(settings: type) -> None:
    for name, entry in describe(settings).items():
        default = entry["default"]
        assert entry["type"] == type(default).__name__, name
        if "help" not in entry:
            continue
        if "min" in entry:
            assert entry["min"] <= default <= entry.get("max", default), name
        if "choices" in entry:
            assert default in entry["choices"], name


@pytest.mark.parametrize(
    ("settings", "published"),
    [
        # Brown et al. 2020, appendix B, and nanoGPT for GPT-2 of 124 million parameters: 0.5 million tokens per update.
        (
            PretrainingSettings,
            {
                "learning_rate": 6e-4,
                "beta1": 0.9,
                "beta2": 0.95,
                "epsilon": 1e-8,
                "weight_decay": 0.1,
                "clip": 1.0,
                "final_rate": 0.1,
                "sequence_length": 1024,
                "global_batch": 480,
            },
        ),
        # He et al. 2015, section 4.2: momentum 0.9, decay 0.0001, 128 images, 64 thousand iterations of CIFAR-10.
        (ClassifierSettings, {"momentum": 0.9, "weight_decay": 1e-4, "batch_size": 128, "epochs": 164}),
        # Wu et al. 2016 and MLPerf's GNMT: beam 5, length penalty 0.6, smoothing 0.1.
        (TranslationSettings, {"beam": 5, "length_power": 0.6, "label_smoothing": 0.1}),
    ],
)
def test_defaults_are_those_of_the_publications(settings: Any, published: dict[str, float]) -> None:
    made = settings()
    assert {name: getattr(made, name) for name in published} == published
