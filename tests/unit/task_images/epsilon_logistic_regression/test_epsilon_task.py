"""epsilon's files and generated rows, and what the settings of the logistic regression become in a training."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from task_images.comm.allreduce import GradientAllReduce, WeightAllReduce
from task_images.contract import Contract
from task_images.epsilon_logistic_regression import data, task
from task_images.epsilon_logistic_regression.data import (
    OFFICIAL,
    count_rows,
    find_files,
    generate,
    hold_out,
    prepare_data,
    read,
    validation_arrays,
)
from task_images.epsilon_logistic_regression.libsvm import Dense
from task_images.epsilon_logistic_regression.regression import (
    LogisticRegression,
    LogisticWork,
    PlainSgd,
    RegularizedLoss,
)
from task_images.epsilon_logistic_regression.settings import Settings
from task_images.harness.data import ArrayData
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.identity import made_up
from task_images.harness.loop import Plan
from task_images.harness.settings import Protocol
from tests.unit.task_images.harness.test_images import one_of

NAMES = ("epsilon_normalized", "epsilon_normalized.t")


def make_rows(count: int) -> Dense:
    rows = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    return Dense(rows, np.arange(count, dtype=np.float32))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "found"),
    [
        (NAMES, NAMES),
        ([f"{name}.bz2" for name in NAMES], [f"{name}.bz2" for name in NAMES]),
        ([NAMES[0], f"{NAMES[1]}.bz2"], [NAMES[0], f"{NAMES[1]}.bz2"]),
        ([*NAMES, f"{NAMES[0]}.bz2"], NAMES),  # plain text needs no unpacking
        ([f"epsilon/{name}" for name in NAMES], [f"epsilon/{name}" for name in NAMES]),
        ([f"{NAMES[0]}.bz2", f"epsilon/{NAMES[0]}", NAMES[1]], [f"{NAMES[0]}.bz2", NAMES[1]]),
    ],
)
def test_files_are_plain_or_compressed_in_the_folder_or_below(
    tmp_path: Path, present: list[str], found: list[str]
) -> None:
    (tmp_path / "epsilon").mkdir()
    for name in present:
        (tmp_path / name).touch()
    assert find_files(str(tmp_path)) == tuple(tmp_path / name for name in found)


@pytest.mark.parametrize(("present", "missing"), [(0, "epsilon_normalized.t"), (1, "epsilon_normalized")])
def test_the_file_that_is_missing_is_named(tmp_path: Path, present: int, missing: str) -> None:
    (tmp_path / NAMES[present]).touch()
    with pytest.raises(EnvironmentUnfitError) as caught:
        find_files(str(tmp_path))
    assert str(caught.value) == (
        f"the data set epsilon is missing: {missing} (or the same with .bz2) is missing in {tmp_path}"
    )
    assert str(caught.value.hint).startswith("mlbench data prepare epsilon_logistic_regression fetches them")


def test_the_identity_is_of_both_files_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"a": (make_rows(4), "sha256:a"), "b": (make_rows(2), "sha256:b")}
    seen: list[Any] = []

    def load(path: Path, features: int) -> Any:
        seen.append((path.name, features))
        return parts[path.name]

    monkeypatch.setattr(data, "load_with_digest", load)
    training, validation, identity = read((Path("a"), Path("b")), 3)
    assert seen == [("a", 3), ("b", 3)]
    assert (training, validation) == (parts["a"][0], parts["b"][0])
    digest = hashlib.sha256(b"sha256:a\nsha256:b\n").hexdigest()
    assert (identity.counts, identity.digest, identity.official) == (
        *({"training rows": 4, "validation rows": 2}, f"sha256:{digest}", False),
    )
    assert read((Path("b"), Path("a")))[2].digest != identity.digest
    assert seen[-1] == ("a", 2000)
    assert OFFICIAL == {"training rows": 400_000, "validation rows": 100_000}


def test_files_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Path] = []

    def fetch(published: Any, folder: Path, say: Any) -> None:
        fetched.append(folder)
        for name in NAMES:
            (folder / name).touch()

    monkeypatch.setattr(data, "fetch_published", fetch)
    monkeypatch.setattr(data, "load_with_digest", lambda path, features: (make_rows(2), path.name))
    monkeypatch.setattr(data, "load", lambda path, features: make_rows(5) if path.name == NAMES[1] else None)
    first = prepare_data(tmp_path, {})
    assert first.counts == {"training rows": 2, "validation rows": 2}
    assert first == prepare_data(tmp_path, {})
    assert fetched == [tmp_path]
    features, labels = validation_arrays(tmp_path)
    assert (features.shape, labels.tolist()) == ((5, 3), [0.0, 1.0, 2.0, 3.0, 4.0])


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "held"), [(10, 0.2, 2), (10, 0.25, 2), (10, 0.26, 3), (10, 0.01, 1), (10, 0.5, 5)]
)
def test_the_last_rows_are_held_out_without_a_copy(count: int, share: float, held: int) -> None:
    whole = make_rows(count)
    training, validation = hold_out(whole, share)
    assert validation.labels.tolist() == list(range(count - held, count))
    assert training.labels.tolist() == list(range(count - held))
    assert np.array_equal(np.concatenate([training.rows, validation.rows]), whole.rows)
    assert training.rows.base is not None
    assert np.shares_memory(validation.rows, whole.rows)
    assert count_rows(training, validation) == {"training rows": count - held, "validation rows": held}


def test_generated_rows_are_nearly_linear_with_features_of_decaying_size() -> None:
    """A quarter of the signal is noise: the best model labels 1 - arctan(0.25) / pi = 92 % of the rows correctly."""
    rows, labels = generate(6000, 1, "training", features=50)
    weights = rows[:4000].T @ (2 * labels[:4000] - 1) / rows[:4000].var(0)  # features are independent
    right = ((rows[4000:] @ weights > 0) == (labels[4000:] == 1)).mean()
    assert 0.88 < right < 0.94
    deviations = np.sort(rows.std(0))[::-1]
    assert deviations[5] / deviations[20] == pytest.approx((21 / 6) ** 1.3, rel=0.1)
    assert deviations[10] / deviations[40] == pytest.approx((41 / 11) ** 1.3, rel=0.1)
    assert rows.std(0)[1:].max() > rows.std(0)[0]  # in an order of the seed's


def test_generated_rows_come_in_blocks_that_do_not_depend_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_BLOCK", 8)
    many, few = generate(20, 1, "training", features=6), generate(16, 1, "training", features=6)
    assert np.array_equal(many.rows[:16], few.rows)
    assert np.array_equal(many.labels[:16], few.labels)
    assert not np.array_equal(many.rows[:8], many.rows[8:16])
    assert np.linalg.norm(many.rows, axis=1) == pytest.approx([1.0] * 20, rel=1e-5)
    assert not np.array_equal(generate(16, 2, "training", features=6).rows, few.rows)
    assert generate(1, 1, "training").rows.shape == (1, 2000)


# --- the task -------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, size: int = 1, **parameters: Any) -> dict[str, Any]:
    """What the training loop is given; files have 40 and 10 rows, generated parts as many as the settings say."""
    given: dict[str, Any] = {"generated": []}
    world = one_of(0, size)
    world.contract = Contract({"MLBENCH_SEED": "5", "MLBENCH_GOAL": "light", "WORLD_SIZE": str(size)})

    @contextmanager
    def session(contract: Contract, *words: Any) -> Iterator[Any]:
        given["session"] = words
        yield world, SimpleNamespace(data_identity=lambda identity: given.update(identity=identity))

    def make(rows: int, seed: int, part: str) -> Dense:
        given["generated"].append((rows, seed, part))
        return make_rows(rows)

    def trainer(*words: Any, **options: Any) -> Any:
        given.update(options, words=words)
        return SimpleNamespace(run=lambda: given.update(ran=True))

    monkeypatch.setattr(task, "training_session", session)
    monkeypatch.setattr(task, "generate", make)
    monkeypatch.setattr(task, "find_files", lambda folder: f"files in {folder}")
    monkeypatch.setattr(task, "read", lambda files: (make_rows(40), make_rows(10), f"identity of {files}"))
    monkeypatch.setattr(task, "seed_all", lambda seed: given.update(seed=seed))
    monkeypatch.setattr(task, "prepare_strategy", lambda world, make: make())
    monkeypatch.setattr(task, "make_sample_trainer", trainer)
    contract = Contract(
        {"MLBENCH_SEED": "5", "MLBENCH_GOAL": "light", "MLBENCH_DATA_DIR": "/d",
         "MLBENCH_PARAMETERS": json.dumps(parameters)}
    )  # fmt: skip
    task.main(contract)
    return given


def test_settings_become_a_training_on_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(
        monkeypatch, batch_size=16, epochs=9, budget_seconds=3.0, l1=0.5, l2=0.25, learning_rate=2.0, loaders=0,
        goal_full=90.0, goal_light=85.0, goal_on="training", blocks=2, blocks_after=1, block_updates=3,
    )  # fmt: skip
    assert (given["session"], given["identity"], given["ran"]) == (("epsilon", False), "identity of files in /d", True)
    assert (given["generated"], given["seed"]) == ([], 5)
    _, _, rows, model, loss, make_optimizer, schedule, plan = given["words"]
    assert isinstance(rows, ArrayData)
    assert [len(batch.targets) for batch in rows.training(1)] == [16, 16, 8]
    assert sum(len(batch.targets) for batch in rows.validation()) == 10
    assert isinstance(model, LogisticRegression)
    assert len(model.weight) == 2000
    assert isinstance(loss, RegularizedLoss)
    assert (loss.model, loss.l1, loss.l2) == (model, 0.5, 0.25)
    optimizer = make_optimizer(model)
    assert isinstance(optimizer, PlainSgd)
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert schedule.rate(0) == 2.0
    assert plan == Plan(9, 3.0, protocol=Protocol(1, 2, 3))
    assert [metric.name for metric in given["metrics"]] == ["Prec@1", "F1-Score", "Dice Coefficient"]
    goal = given["goal"]
    assert (goal.threshold, goal.comparison, goal.thresholds) == (85.0, ">=", {"full": 90.0, "light": 85.0})
    assert given["scores"] is torch.sigmoid
    assert isinstance(given["work"], LogisticWork)
    assert given["unit"].name == "rows"
    assert given["details"] == {
        "parameters": 2000, "rows": [40, 10], "options": {"loaders": 0, "gradient": "closed form"},
    }  # fmt: skip


def test_generated_rows_have_their_numbers_and_are_not_official(monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(monkeypatch, data="synthetic", training_rows=30, validation_rows=7)
    assert given["session"] == ("epsilon, generated", True)
    assert given["generated"] == [(30, 5, "training"), (7, 5, "validation")]
    assert given["identity"] == made_up({"training rows": 30, "validation rows": 7})
    assert given["details"]["rows"] == [30, 7]


def test_held_out_rows_replace_the_validation_set_but_not_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(monkeypatch, data="synthetic", training_rows=30, validation_rows=7, hold_out=0.2)
    assert given["details"]["rows"] == [24, 6]
    assert given["identity"].counts == {"training rows": 30, "validation rows": 7}


@pytest.mark.parametrize(("average", "kind"), [("gradients", GradientAllReduce), ("weights", WeightAllReduce)])
def test_ranks_average_gradients_or_weights(monkeypatch: pytest.MonkeyPatch, average: str, kind: type) -> None:
    assert type(run(monkeypatch, average=average)["strategy"]) is kind


@pytest.mark.parametrize(
    ("settings", "workers", "rate"),
    [
        ({"learning_rate": 3.0}, 1, 3.0),
        ({"learning_rate": 3.0}, 20, 60.0),
        ({"learning_rate": 3.0, "scale_limit": 16}, 15, 45.0),
        ({"learning_rate": 3.0, "scale_limit": 16}, 16, 48.0),
        ({"learning_rate": 3.0, "scale_limit": 16}, 17, 48.0),
        ({"schedule": "sqrt"}, 1, 200.0),
        ({"schedule": "sqrt"}, 2, 400.0),
        ({"schedule": "sqrt"}, 7, 600.0),
        ({"schedule": "sqrt"}, 8, 700.0),
        ({"schedule": "sqrt"}, 15, 700.0),
        ({"schedule": "sqrt"}, 16, 800.0),
        ({"schedule": "sqrt", "alpha": 30.0}, 16, 30.0),  # given by hand
    ],
)
def test_the_first_rate(settings: dict[str, Any], workers: int, rate: float) -> None:
    schedule = task.make_schedule(Settings(**settings), workers)
    assert schedule.rate(0) == pytest.approx(rate)


def test_a_plateau_ends_at_the_rate_of_one_worker() -> None:
    schedule = task.make_schedule(Settings(learning_rate=3.0, plateau_factor=0.5, plateau_patience=1), 4)
    rates = []
    for _ in range(12):
        rates.append(schedule.rate(0))
        schedule.after_epoch(1.0)
    assert rates[0] == 12.0  # from the beginning: there is no warm-up
    assert sorted(set(rates), reverse=True) == [12.0, 6.0, 3.0]


# --- the gradient ---------------------------------------------------------------------------------------------------


def test_rows_get_a_graph_only_where_somebody_needs_one() -> None:
    model = LogisticRegression(3)
    work = LogisticWork(lambda part, training: (part, training), RegularizedLoss(model, 0.0, 0.0))
    rows = torch.ones(2, 3), torch.ones(2)
    assert work.prepare(rows) == (rows, True)  # type: ignore[comparison-overlap]
    assert not work.forward(model, rows).requires_grad

    class Wrapped(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return model.forward(rows)

    assert work.forward(Wrapped(), rows).requires_grad
    handle = model.register_forward_pre_hook(lambda *_: None)
    assert work.forward(model, rows).requires_grad
    handle.remove()
    model.weight = nn.Parameter(model.weight.detach().clone())  # somebody put the weights elsewhere
    assert work.forward(model, rows).requires_grad


def test_accuracies_are_those_of_the_passes_since_the_last_call() -> None:
    model = LogisticRegression(2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([1.0, -1.0]))
    work = LogisticWork(lambda part, training: part, RegularizedLoss(model, 0.0, 0.0))
    rows = torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    passed = [work.loss(work.forward(model, part), part) for part in (rows, (rows[0][:1], rows[1][:1]))]
    losses = work.read_losses([one.mean for one in passed])
    logs = [float(torch.nn.functional.softplus(torch.tensor(z))) for z in (-1.0, -1.0, 3.0, 0.0)]
    assert losses == pytest.approx([sum(logs) / 4, logs[0]])
    world = one_of(0, 1)
    found = work.collect_metrics(world)
    # A logit of 0 says no: three of four are right, and the one row of the second pass.
    assert list(found.values()) == [pytest.approx(80.0)]
    assert [one.weight for one in passed] == [4, 1]


def test_the_gradient_of_norms_is_added_times_its_factor() -> None:
    model = LogisticRegression(3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([2.0, -4.0, 0.0]))
    loss = RegularizedLoss(model, 0.5, 0.25)
    loss.add_gradient(model.weight, 2.0)
    assert model.weight.grad is None
    model.weight.grad = torch.ones(3)
    loss.add_gradient(model.weight, 2.0)
    assert model.weight.grad.tolist() == [1 + 2 * (0.5 + 0.5), 1 - 2 * (0.5 + 1.0), 1.0]
    assert float(loss.sum_norms(model.weight.detach())) == 0.5 * 6 + 0.125 * 20
