"""Parameters of tasks: types, choices and inheritance, as the tool, the documentation and the program see them."""

import pytest

from task_images.language.pretraining import PretrainingSettings
from task_images.parameters import ClassifierSettings, LongClassifierSettings, TrainingSettings, describe
from task_images.translation.training import TranslationSettings


@pytest.mark.parametrize(
    "settings", [TrainingSettings, PretrainingSettings, ClassifierSettings, LongClassifierSettings, TranslationSettings]
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
