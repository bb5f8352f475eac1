"""When to go over to averaged SGD, and the average itself."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from task_images.loop import Values
from task_images.report import Reporter
from task_images.wikitext2_awd_lstm.model import AwdLstm


def should_switch(losses: Sequence[float], patience: int, rule: str) -> bool:
    """Whether the validation losses so far (oldest first) end the plain SGD.

    `stalled`: the last `patience` epochs brought no new minimum. `non_monotone` (Merity et al., algorithm 1, with
    one validation per epoch): the last loss is above the minimum of all but the last `patience`.
    """
    if len(losses) <= patience:
        return False
    earlier = min(losses[:-patience])
    return min(losses[-patience:]) >= earlier if rule == "stalled" else losses[-1] > earlier


class RunningAverage:
    """Mean of the parameters over all updates since `start`: averaged SGD with λ = 0 and t0 = 0 (Polyak, Ruppert)."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.means: list[Tensor] = []
        self.count = 0

    @property
    def active(self) -> bool:
        """Whether averaging has begun."""
        return bool(self.means)

    def start(self) -> None:
        """Begin with the parameters as they are now."""
        self.means = [parameter.detach().clone() for parameter in self.parameters]
        self.count = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are after an update. Nothing happens before `start`."""
        if not self.active:
            return
        self.count += 1
        torch._foreach_lerp_(self.means, [parameter.detach() for parameter in self.parameters], 1 / self.count)

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """The parameters are the averages inside, and what they were before outside."""
        if not self.active:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(kept)

    def state_dict(self) -> dict[str, object]:
        """Means and count, for a checkpoint."""
        return {"means": self.means, "count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a checkpoint. Raises ValueError if it holds something else."""
        means, count = state["means"], state["count"]
        if not isinstance(means, list) or not isinstance(count, int):
            raise ValueError("not the state of a running average")
        self.means = [mean.to(parameter.device) for mean, parameter in zip(means, self.parameters, strict=False)]
        self.count = count


class Average:
    """Averaged SGD: when it begins, and the means of the parameters since then."""

    def __init__(self, model: AwdLstm, patience: int, rule: str, report: Reporter) -> None:
        self.mean = RunningAverage(model.parameters())
        self.switched: int | None = None
        self._patience, self._rule, self._report = patience, rule, report
        self._losses: list[float] = []

    def observe(self, epoch: int, values: Values) -> None:
        """Take note of a validation; begin averaging when its loss no longer falls."""
        self._losses.append(values["loss"])
        if self.mean.active or not should_switch(self._losses, self._patience, self._rule):
            return
        self.mean.start()
        self.switched = epoch
        self._report.say(f"epoch {epoch}: the validation loss no longer falls; switching to averaged SGD")

    def state_dict(self) -> dict[str, object]:
        """Mean, switch and losses, for a checkpoint."""
        return {"mean": self.mean.state_dict(), "switched": self.switched, "losses": self._losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.mean.load_state_dict(state["mean"])
        self.switched, self._losses = state["switched"], list(state["losses"])
