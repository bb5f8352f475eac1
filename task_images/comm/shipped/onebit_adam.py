"""1-bit Adam: after a warm-up the variance is frozen and momenta are sent as signs (Tang et al. 2021, algorithm 1)."""

from collections.abc import Mapping, Sequence

from task_images.comm.door import Option, RegisteredMethod, Round, Run


class OneBitAdam(RegisteredMethod):
    """For `warmup_steps` updates this is the task's Adam on the mean gradient. Then each rank adds its own gradient to
    the momentum, sends signs and one scale per tensor with error feedback, and divides the mean by the root of the
    frozen variance.

    The paper's server compresses the mean again; here signs are all-gathered, and every rank computes their mean.
    """

    name = "onebit-adam"
    summary = "Adam; after a warm-up, sends one bit per element of the momentum and freezes the variance"
    source = "Tang et al. 2021, arXiv:2102.02888"
    formula = "2 (P-1)/P M during the warm-up, then (P-1) (ceil(d/8) + 4 per tensor)"
    options = {"warmup_steps": Option(100, 1, 10**9, "warm-up updates with plain Adam")}  # noqa: RUF012
    late_options = ("warmup_steps",)
    optimizers = ("AdamW",)
    note = "The task's optimizer must be AdamW; with any other, the run fails."

    def start(self, run: Run) -> None:
        """Create the state: the compression error, the momentum, and the root of the frozen variance."""
        for name in ("residual", "momentum", "root"):
            run.state[name] = run.weights * 0

    def reduce(self, run: Run) -> None:
        """Average gradients during the warm-up."""
        if run.update <= run.options["warmup_steps"]:
            run.gradients = run.average(run.gradients)

    def step(self, run: Run, rate: float) -> bool:
        """After the warm-up, make Adam's step with the mean of compressed momenta."""
        group, warm = run.optimizer.param_groups[0], int(run.options["warmup_steps"])
        if run.update <= warm:
            return False
        first, second = group["betas"]
        if not run.state["root"].any():
            run.state["momentum"] = run.optimizer_state("exp_avg")
            variance = run.optimizer_state("exp_avg_sq") / (1 - second ** run.optimizer_state("step").max())
            run.state["root"] = variance.sqrt() + group["eps"]
        own = first * run.state["momentum"] + (1 - first) * run.gradients + run.state["residual"]
        run.state["momentum"], sent = run.average_signs(own)
        run.state["residual"] = own - sent
        run.weights = run.decayed_weights(rate) - rate * run.state["momentum"] / run.state["root"]
        return True

    def rounds(self, count: int, options: Mapping[str, float]) -> Sequence[Round]:
        """One bit per number, as after the warm-up; scales are neglected."""
        return [Round("allgather", count / 8)]
