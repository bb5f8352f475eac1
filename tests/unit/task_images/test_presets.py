"""Presets are what specification and original say."""

import pytest

from mlbench_cli.tasks.catalog import load_task


@pytest.mark.parametrize(
    ("name", "preset", "expected"),
    [
        (
            "wikitext2_awd_lstm",
            "spec",
            {"batch_size": 80, "learning_rate": 30, "warmup_epochs_per_rank": 3, "clip": 0.25},
        ),
        ("wikitext2_awd_lstm", "spec", {"epochs": 750, "weight_decay": 1.2e-6, "goal_full": 70, "goal_light": 90}),
        ("wikitext2_awd_lstm", "legacy", {"batch_size": 20, "learning_rate": 15, "warmup_epochs_per_rank": 0}),
        (
            "wmt16_gnmt",
            "spec",
            {"loss_scale": 2**10, "largest_loss_scale": 2**13, "beam": 5, "gradient_mean": "global"},
        ),
        ("wmt16_gnmt", "spec", {"warmup_start": 0, "goal_full": 24, "goal_light": 20, "epochs": 8, "clip": 5}),
        ("wmt16_gnmt", "legacy", {"warmup_start": 0.01, "gradient_mean": "local", "reshuffle": False, "clip": 5}),
        (
            "wmt17_transformer",
            "spec",
            {"longest_test": 80, "reshuffle": True, "beam": 4, "goal_full": 25, "epochs": 10},
        ),
        ("wmt17_transformer", "legacy", {"longest_test": 80, "reshuffle": False, "learning_rate": 1.976e-3}),
    ],
)
def test_what_the_presets_must_say(name: str, preset: str, expected: dict[str, object]) -> None:
    values = load_task(name).resolve(preset)
    assert {key: values[key] for key in expected} == expected
