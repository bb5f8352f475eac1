"""SlowMo: local steps, periodic averages, and momentum on the averages (Wang et al. 2020, algorithm 1)."""

from collections.abc import Mapping, Sequence

from task_images.comm.door import Option, RegisteredMethod, Round, Run


class SlowMo(RegisteredMethod):
    """Every `steps` updates, u <- beta u + (x_0 - mean x) / rate, and all ranks continue from x_0 - alpha rate u."""

    name = "slowmo"
    summary = "local steps with momentum on their averages"
    source = "Wang et al. 2020, arXiv:1910.00643"
    formula = "2 (P-1)/P M / steps"
    options = {  # noqa: RUF012
        "steps": Option(4, 1, 10**6, "updates between averages"),
        "beta": Option(0.5, 0, 0.999, "slow momentum"),
        "alpha": Option(1, 0.01, 10, "slow learning rate"),
    }
    late_options = ("steps",)
    identical = False

    def start(self, run: Run) -> None:
        """Start with the common weights and zero slow momentum."""
        run.state["anchor"] = run.weights
        run.state["momentum"] = run.weights * 0

    def exchange(self, run: Run, rate: float) -> None:
        """The outer step after every `steps` updates."""
        if run.update % int(run.options["steps"]):
            return
        anchor, momentum = run.state["anchor"], run.state["momentum"]
        change = (anchor - run.average(run.weights)) / rate if rate else 0
        momentum.mul_(run.options["beta"]).add_(change)
        anchor.sub_(momentum, alpha=run.options["alpha"] * rate)
        run.weights = anchor

    def rounds(self, count: int, options: Mapping[str, float]) -> Sequence[Round]:
        """One average of all weights."""
        return [Round("allreduce", 4 * count, int(options["steps"]))]
