"""Parameters of tasks: types, choices and inheritance, as the tool, the documentation and the program see them."""

from typing import Any

import pytest

from task_images.language import PretrainingSettings
from task_images.parameters import CheckpointedSettings, ClassifierSettings, TrainingSettings, describe
from task_images.translation import TranslationSettings


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
