"""What translations are scored by, and which of the scores the goal is held against."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.translation.batches import Update
from task_images.translation.training import Translation

SENTENCES = ["The cat sat on the old red mat today .", "A dog ran over the green hill again ."]


@pytest.mark.parametrize("goal_bleu", ["lowercased", "cased"])
def test_the_goal_is_held_against_the_bleu_that_it_was_set_on(goal_bleu: str) -> None:
    """All translations are right but for capital letters, which one of both figures counts as faults."""
    task: Any = SimpleNamespace(
        settings=SimpleNamespace(goal_bleu=goal_bleu),
        text=lambda words: SENTENCES[words[0]].lower(),
        references=SENTENCES,
    )
    values = Translation.score(task, [[0], [1]])
    assert values["bleu_lowercased"] == pytest.approx(100.0)
    assert values["bleu_cased"] < 90.0
    assert values["BLEU-Score"] == values[f"bleu_{goal_bleu}"]
    assert f"case:{'lc' if goal_bleu == 'lowercased' else 'mixed'}" in str(task.latest["bleu_signature"])


@pytest.mark.parametrize(("name", "longest"), [("wmt16_gnmt", 150), ("wmt17_transformer", 80)])
def test_goals_and_test_sets_are_those_of_the_specification(name: str, longest: int) -> None:
    spec = load_task(name).resolve()
    assert (spec["goal_bleu"], spec["longest_test"]) == ("lowercased", longest)


@pytest.mark.parametrize(("unit", "total"), [("tokens", 30), ("sentences", 8), ("own_sentences", 1)])
def test_gradients_are_divided_by_what_the_task_says_and_passes_keep_their_numbers(unit: str, total: int) -> None:
    batches = SimpleNamespace(updates=lambda epoch, begin: iter([Update([], 4, 8, 30)]))
    task: Any = SimpleNamespace(batches=batches, divide_by=unit)
    [update] = Translation.updates(task, 1)
    assert (update.total, update.samples, update.first) == (total, 8, 4)
