"""Which direction of a metric is better, by the names that libraries give it."""

import pytest

from mlbench_cli.model.goals import Goal
from mlbench_cli.results.analysis.program_metrics import find_direction

HIGHER = ("eval_accuracy", "acc_norm,none", "val/f1", "train_samples_per_second", "bleu", "test_score", "it/s")
LOWER = ("eval_loss", "val_ppl", "mean_absolute_error", "nll", "score_time", "WER")
UNKNOWN = (
    *("neg_log_loss", "acc_stderr,none", "loss_scale", "learning_rate", "error_rate", "accuracy_std", "epoch"),
    *("accuracy_drop", "energy_efficiency", "loss_reduction"),
)


@pytest.mark.parametrize(
    ("names", "is_higher_better"), [(HIGHER, True), (LOWER, False), (UNKNOWN, None)], ids=["higher", "lower", "unknown"]
)
def test_the_name_of_a_metric_tells_which_direction_is_better(
    names: tuple[str, ...], is_higher_better: bool | None
) -> None:
    """scikit-learn's scores have the other sign, and the spread of a metric is not the metric."""
    assert {name: find_direction(name) for name in names} == dict.fromkeys(names, is_higher_better)
    goal = Goal(names[0], "<=", 1.0)
    assert find_direction(names[0], goal) is False  # whatever its name tells
