"""DiLoCo: many local AdamW steps, then an outer step with Nesterov momentum (Douillard et al. 2023, algorithm 1)."""

from collections.abc import Mapping, Sequence

from task_images.comm.door import Option, RegisteredMethod, Round, Run


class DiLoCo(RegisteredMethod):
    """Every `steps` updates, the mean change of all ranks is the gradient of an outer SGD with Nesterov momentum."""

    name = "diloco"
    summary = "many local steps with the task's optimizer, then an outer step with Nesterov momentum"
    source = "Douillard et al. 2023, arXiv:2311.08105"
    formula = "2 (P-1)/P M / steps"
    options = {  # noqa: RUF012
        "steps": Option(50, 1, 10**6, "inner updates between outer steps"),
        "outer_rate": Option(0.7, 0.001, 10, "learning rate of the outer step"),
        "outer_momentum": Option(0.9, 0, 0.999, "Nesterov momentum of the outer step"),
    }
    late_options = ("steps",)
    identical = False
    note = "The paper takes 500 inner steps with AdamW; the default here is 50 steps with the task's optimizer."

    def start(self, run: Run) -> None:
        """Start with the common weights and zero outer momentum."""
        run.state["anchor"] = run.weights
        run.state["momentum"] = run.weights * 0

    def exchange(self, run: Run, rate: float) -> None:
        """The outer step, after every `steps` inner ones."""
        if run.update % int(run.options["steps"]):
            return
        anchor, momentum, factor = run.state["anchor"], run.state["momentum"], run.options["outer_momentum"]
        change = run.average(anchor - run.weights)
        momentum.mul_(factor).add_(change)
        anchor.sub_(change.add_(momentum, alpha=factor), alpha=run.options["outer_rate"])
        run.weights = anchor

    def rounds(self, count: int, options: Mapping[str, float]) -> Sequence[Round]:
        """One average of the changes."""
        return [Round("allreduce", 4 * count, int(options["steps"]))]
