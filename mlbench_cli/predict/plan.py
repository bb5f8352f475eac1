"""Candidates for a goal with time, price and intervals: cloud x region x machine x workers x method x batch size.

Time = start-up + steps x step + validation. The step is simulated, with computation scaled to the machine and a
textbook ring or NCCL's model for its network. Errors of the parts, and so of the time, are assumed to be independent
and log-normal; `low` and `high` are the 10th and 90th percentiles. Spot machines add the cost of interruptions at the
best checkpoint interval (Young 1974, Daly 2006).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import NormalDist

from mlbench_cli.errors import UsageError
from mlbench_cli.predict.machines import (
    HERE,
    NETWORK_DELAY,
    NETWORK_SHARE,
    Calibrated,
    MachineType,
    Speed,
    compare_speed,
    load_gpus,
)
from mlbench_cli.predict.samples import Basis, SamplesToGoal
from mlbench_cli.simulator.calibration import Calibration
from mlbench_cli.simulator.collectives import Collectives, GlooCollectives, NcclCollectives, RingCollectives, Topology
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.predict import FAR_ERROR, INSIDE_LINKS, MAX_GROWTH, OTHER_ERROR, REPLAY_ERROR
from mlbench_cli.simulator.step import Step, simulate_step
from mlbench_cli.simulator.workload import Tensor, Workload
from mlbench_cli.util.front import find_front
from task_images.comm.methods import Method

# Seconds from `create-cluster` to the first step, within a factor of 1.5; a guess.
STARTUP = {HERE: 5.0, "gke": 480.0, "eks": 1080.0, "aks": 480.0}
STARTUP_SPREAD = 0.32
CHECKPOINT_SECONDS = 10.0  # a guess
RESTART_SECONDS = 300.0  # until a replaced machine trains again; a guess
WORKERS = (1, 2, 4, 8, 16, 32)
BATCH_FACTORS = (0.5, 1.0, 2.0, 4.0)
_Z90 = NormalDist().inv_cdf(0.9)
MAX_TENSORS = 16  # of a simulated step, because thousands are simulated
MIN_EXPOSED = 0.15  # share of a step above which communication is named as a reason


@dataclass(frozen=True)
class Offer:
    """A machine type in a region with its price per hour, and the price of the control plane.

    as_of   date of the price, as its table says it; interrupted: interruptions of one machine per hour, for spot
    """

    machine: MachineType
    region: str
    price: float
    control_plane: float = 0.0
    as_of: str | None = None
    is_spot: bool = False
    interrupted: float = 0.0


@dataclass(frozen=True)
class Question:
    """The question to plan for.

    methods       to compare; each has the factor on samples to the goal, measured against the calibration's method
    max_rank_batch  largest supported batch of a rank
    validation    seconds that validations took until the goal, on `own_ranks` ranks
    memory_gib    measured memory of a rank; None: unknown
    """

    task: str
    calibration: Calibration
    link: Link | None
    calibrated: Calibrated
    samples: SamplesToGoal
    methods: Sequence[tuple[Method, float]]
    validation: float = 0.0
    max_rank_batch: int | None = None
    memory_gib: float | None = None
    devices: Sequence[str] = ("cpu", "gpu")
    can_resume: bool = False
    others: Sequence[Calibrated] = ()
    workers: Sequence[int] = WORKERS
    batch_factors: Sequence[float] = BATCH_FACTORS
    is_started: bool = False  # the machines are already running
    max_price: float | None = None
    deadline: float | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to reach the goal. Seconds and prices are medians; `spread` is the standard deviation of log(time).

    parts     that deviation by cause: speed, step, samples, start-up
    chance    probability that time and price are within the limits; None without limits
    """

    offer: Offer
    workers: int
    method: str
    rank_batch: int
    batch: int
    samples: float
    kept: float
    step: Step
    seconds: float
    price: float
    startup: float
    spread: float
    parts: Mapping[str, float]
    bases: Mapping[str, Basis]
    speed: Speed
    overhead: float = 0.0
    checkpoint_every: float | None = None
    chance: float | None = None
    task: str = ""

    @property
    def low(self) -> float:
        """10th percentile of the seconds."""
        return self.seconds * math.exp(-_Z90 * self.spread)

    @property
    def high(self) -> float:
        """90th percentile of the seconds."""
        return self.seconds * math.exp(_Z90 * self.spread)

    @property
    def exposed(self) -> float:
        """Share of a step spent in exposed communication."""
        return self.step.exposed / self.step.seconds if self.step.seconds else 0.0

    @property
    def per_second(self) -> float:
        """Price per second."""
        return self.price / self.seconds if self.seconds else 0.0

    @property
    def name(self) -> str:
        """Machine, workers and method as a short phrase."""
        spot = " spot" if self.offer.is_spot else ""
        return f"{self.workers} x {self.offer.machine}{spot}, {self.method}, batch {self.batch}"


@dataclass(frozen=True)
class Excluded:
    """A reason why candidates are excluded, with their number and a remedy."""

    reason: str
    count: int
    hint: str = ""


@dataclass(frozen=True)
class PlanResult:
    """All candidates, the Pareto front of time and price, the best, and the excluded ones with reasons."""

    candidates: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    best: tuple[Candidate, ...]
    excluded: tuple[Excluded, ...]
    question: Question = field(repr=False)


def make_plan(question: Question, offers: Sequence[Offer], excluded: Sequence[Excluded] = ()) -> PlanResult:
    """Predict all candidates of the offers. Raises UsageError with the reasons if none remains."""
    reasons: Counter[tuple[str, str]] = Counter()
    simulate = _simulator(question)
    found = list(_candidates(question, offers, simulate, reasons))
    left_out = [*excluded, *(Excluded(reason, count, hint) for (reason, hint), count in reasons.most_common())]
    return _rank(found, left_out, question)


def leave_out(plan: PlanResult, offer: Offer, workers: int, reason: Excluded) -> PlanResult:
    """The plan without the offer's candidates of that many workers or more. Raises UsageError if none remains."""
    kept = [item for item in plan.candidates if item.offer != offer or item.workers < workers]
    gone = replace(reason, count=len(plan.candidates) - len(kept))
    return _rank(kept, [gone, *plan.excluded], plan.question)


def _rank(found: list[Candidate], left_out: Sequence[Excluded], question: Question) -> PlanResult:
    if not found:
        first = left_out[0] if left_out else Excluded("there is no offer", 0)
        raise UsageError(f"No candidate remains: {first.reason}.", hint=first.hint or "Other --clouds or --workers")
    found.sort(key=lambda item: (item.seconds, item.price))
    front = find_front(found, lambda item: (item.seconds, item.price))
    return PlanResult(tuple(found), tuple(front), tuple(_choose(found, question)), tuple(left_out), question)


def count_bases(candidates: Sequence[Candidate]) -> dict[Basis, float]:
    """The share of each basis among the figures of candidates."""
    counted = Counter(basis for item in candidates for basis in item.bases.values())
    total = sum(counted.values()) or 1
    return {basis: counted[basis] / total for basis in Basis}


def explain(item: Candidate, plan: PlanResult) -> list[str]:
    """Reasons why a candidate is among the best, and its bottleneck."""
    reasons = []
    alike = [
        other
        for other in plan.candidates
        if (other.offer, other.workers, other.rank_batch) == (item.offer, item.workers, item.rank_batch)
        and other.method != item.method
    ]
    slower = max(alike, key=lambda other: other.step.seconds, default=None)
    if slower is not None and slower.step.seconds > 1.05 * item.step.seconds:
        share = 1 - item.step.seconds / slower.step.seconds
        reasons.append(
            f"method {item.method} saves {share:.0%} of the step of {slower.method}, "
            f"which leaves {slower.exposed:.0%} in communication"
        )
    if item.exposed >= MIN_EXPOSED:
        reasons.append(f"{item.exposed:.0%} of a step is exposed communication")
    if item.kept < 0.9:
        reasons.append(f"at batch {item.batch} a sample keeps {item.kept:.0%} of its value")
    if item.startup > 0.25 * item.seconds:
        reasons.append(f"{item.startup / item.seconds:.0%} of the time is start-up")
    if item.overhead > 0.02 * item.seconds:
        reasons.append(f"interruptions add {item.overhead / item.seconds:.0%}")
    if item is min(plan.candidates, key=lambda other: other.price):
        reasons.append("the lowest price of all")
    if item is min(plan.candidates, key=lambda other: other.seconds):
        reasons.append("the shortest time of all")
    return reasons or ["a low price for its time"]


def find_sensitivities(item: Candidate) -> list[tuple[str, float, float]]:
    """Main causes of uncertainty: (cause, share of the uncertainty, factor on the time at its 90th percentile)."""
    total = sum(value * value for value in item.parts.values()) or 1.0
    found = [(name, value * value / total, math.exp(_Z90 * value)) for name, value in item.parts.items() if value]
    return sorted(found, key=lambda row: -row[1])


def find_interruption_cost(work: float, rate: float, can_resume: bool) -> tuple[float, float | None]:
    """Expected seconds that interruptions add to `work` seconds, and the best checkpoint interval.

    `rate` interruptions per second, exponential. Interval: Young 1974; time: Daly 2006, equation 20. Without
    checkpoints, every interruption restarts the work.
    """
    if not rate:
        return 0.0, None
    if not can_resume:
        exponent = min(rate * work, 50.0)
        return (1 / rate + RESTART_SECONDS) * math.expm1(exponent) - work, None
    every = min(math.sqrt(2 * CHECKPOINT_SECONDS / rate), work)
    exponent = min((every + CHECKPOINT_SECONDS) * rate, 50.0)
    total = math.exp(min(RESTART_SECONDS * rate, 50.0)) / rate * math.expm1(exponent) * work / every
    return max(0.0, total - work), every


def keeps_samples(method: Method) -> bool:
    """Whether a method updates with the exact mean of all gradients in every step; all such methods need the same
    samples to a goal."""
    if method.engine == "registered":
        return False
    return (
        (method.sync, method.staleness, method.momentum, method.feedback) == ("every", "sync", "none", "none")
        and method.codec in ("none", "fp16", "bf16")
        and method.transport not in ("gossip", "noop")
    )


# --- candidates -------------------------------------------------------------------------------------------------------

Simulate = Callable[[float, float, Link | None, int, int, str, Method], Step]


def _simulator(question: Question) -> Simulate:
    """The step for (computation factor, batch factor, link, workers, ranks each, links inside, method), remembered.

    Without a link it is the calibration's own.
    """

    @cache
    def work(factor: float, batch: float, merged: bool, gpu: bool) -> Workload:
        whole = question.calibration.workload
        scaled = whole.scale(factor * batch)
        return replace(
            scaled,
            tensors=_merge(scaled.tensors) if merged else scaled.tensors,
            optimizer=whole.optimizer * factor,  # the update is the same for every batch size
            overlap=0.0 if gpu else whole.overlap,  # NCCL hardly slows down a GPU's computation
        )

    @cache
    def simulate(
        factor: float, batch: float, link: Link | None, nodes: int, per: int, inside: str, method: Method
    ) -> Step:
        collectives: Collectives
        workload = work(factor, batch, method.plan != "tensor", bool(inside))
        if inside:
            links = INSIDE_LINKS[inside], link or Link(0.0, 0.0)
            collectives = NcclCollectives(Topology(nodes, per, *links, inside, 1.0))
        elif link is None:
            collectives = GlooCollectives(nodes, question.link or Link(0.0, 0.0))
        else:  # gloo waits for the receiver's "ready": two latencies per hop
            collectives = RingCollectives(nodes * per, 2 * link.alpha + link.overhead, link.beta)
        return simulate_step(workload, method, collectives)

    return simulate


def _merge(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Merge tensors into at most MAX_TENSORS groups of about equal size, each ready with its last tensor. Plans merge
    them anyway."""
    size = -(-len(tensors) // MAX_TENSORS)
    groups = [tensors[start : start + size] for start in range(0, len(tensors), size)]
    return tuple(Tensor(group[-1].name, sum(each.size for each in group), group[-1].ready) for group in groups)


def _candidates(
    question: Question, offers: Sequence[Offer], simulate: Simulate, reasons: Counter[tuple[str, str]]
) -> Iterator[Candidate]:
    cells = len(question.workers) * len(question.methods) * len(question.batch_factors)
    for offer in offers:
        machine = offer.machine
        if ("gpu" if machine.gpus else "cpu") not in question.devices:
            reasons[f"{question.task} does not run on {'GPUs' if machine.gpus else 'CPUs'}", ""] += cells
            continue
        speed = compare_speed(question.task, machine, question.calibrated, question.others)
        for workers in question.workers:
            if machine.provider == HERE and workers * question.calibrated.cores > machine.vcpus:
                reasons[f"this machine has {machine.vcpus} cores", "Fewer --workers"] += cells // len(question.workers)
                continue
            for factor in question.batch_factors:
                # A single rank sends nothing, so all methods are equal.
                methods = question.methods[:1] if workers * machine.ranks == 1 else question.methods
                for method, on_samples in methods:
                    try:
                        yield _evaluate(question, offer, speed, workers, factor, method, on_samples, simulate)
                    except UsageError as error:
                        reasons[error.message.rstrip("."), error.hint or ""] += 1


def _evaluate(
    question: Question,
    offer: Offer,
    speed: Speed,
    workers: int,
    factor: float,
    method: Method,
    on_samples: float,
    simulate: Simulate,
) -> Candidate:
    """Evaluate one candidate. Raises UsageError with the reason if it is impossible."""
    own, machine = question.calibration, offer.machine
    ranks = workers * machine.ranks
    rank_batch = max(1, round(own.batch * factor))
    if question.max_rank_batch is not None and rank_batch > question.max_rank_batch:
        raise UsageError(f"{question.task} supports batches of at most {question.max_rank_batch} per rank")
    if question.memory_gib is not None:
        room = machine.memory_gib / machine.ranks
        if question.memory_gib * max(1.0, factor) > room and machine.provider != HERE:
            raise UsageError(f"a rank needs more than the {room:.0f} GiB of {machine.name}")
    batch = ranks * rank_batch
    needed = question.samples.samples(batch)
    kept = question.samples.kept(batch)
    if needed is None or kept is None:
        raise UsageError(
            "the samples to the goal at other batch sizes are unknown",
            hint="A run at another batch size (--from RUN), or one with two workers and --calibrate",
        )
    samples = needed * on_samples
    is_own = machine.provider == HERE and ranks == own.ranks and factor == 1
    inside = ""
    if machine.gpus and ranks > 1 and machine.provider != HERE:
        inside = load_gpus()[machine.gpu].inside
    measured = next(
        (one.link for one in (question.calibrated, *question.others) if one.machine == machine.kind and one.link), None
    )
    link = None if machine.provider == HERE else measured or _documented_link(machine)
    if link is None and ranks > 1 and question.link is None:
        raise UsageError("the calibration has no network: its run had one worker", hint="A calibration of two workers")
    step = simulate(speed.factor, rank_batch / own.batch, link, workers, machine.ranks, inside, method)
    validation = question.validation * speed.factor * own.ranks / ranks * samples / question.samples.known
    work = samples / batch * step.seconds + validation
    startup = 0.0 if question.is_started else STARTUP[machine.provider]
    rate = workers * offer.interrupted / 3600
    overhead, every = find_interruption_cost(work, rate, question.can_resume)
    seconds = startup + work + overhead
    error = _spread_of(REPLAY_ERROR if is_own else FAR_ERROR if ranks > MAX_GROWTH * own.ranks else OTHER_ERROR)
    share = (work + overhead) / seconds
    parts = {
        "speed of the machine": speed.spread * share * step.compute / step.seconds if step.seconds else 0.0,
        "step and network": error * share,
        "samples to the goal": question.samples.log_error(batch) * share,
        "start-up": STARTUP_SPREAD * startup / seconds if machine.provider != HERE else 0.0,
    }
    bases = {
        "speed": speed.basis,
        "network": Basis.MEASURED if measured or machine.provider == HERE else Basis.PUBLISHED,
        "samples": Basis.MEASURED if kept == 1 else question.samples.basis or Basis.GUESSED,
        "price": Basis.PUBLISHED if offer.price else Basis.MEASURED,
        "start-up": Basis.MEASURED if machine.provider == HERE else Basis.GUESSED,
    }
    if workers * machine.ranks == 1:
        del bases["network"]
    spread = math.sqrt(sum(value * value for value in parts.values()))
    price = (workers * offer.price + offer.control_plane) * seconds / 3600
    item = Candidate(
        *(offer, workers, method.name, rank_batch, batch, samples, kept, step, seconds, price, startup, spread),
        *(parts, bases, speed, overhead, every),
    )
    return replace(item, chance=find_chance(item, question), task=question.task)


@cache
def _documented_link(machine: MachineType) -> Link:
    """The share of the cloud's documented rate that streams reach."""
    return Link(NETWORK_DELAY, 8e-9 / (machine.gbits * NETWORK_SHARE))


def _spread_of(errors: tuple[float, float]) -> float:
    """The standard deviation of a logarithm from relative errors on both sides (10th and 90th percentiles)."""
    return math.log((1 + errors[1]) / (1 - errors[0])) / (2 * _Z90)


def find_chance(item: Candidate, question: Question) -> float | None:
    """The probability of keeping both limits: price is proportional to time, so the tighter limit counts."""
    limits = []
    if question.deadline is not None:
        limits.append(question.deadline)
    if question.max_price is not None and item.per_second:
        limits.append(question.max_price / item.per_second)
    if not limits:
        return None if question.deadline is None and question.max_price is None else 1.0
    distance = math.log(max(min(limits), 1e-9) / item.seconds)
    return NormalDist().cdf(distance / item.spread) if item.spread else float(distance >= 0)


def _choose(found: Sequence[Candidate], question: Question, count: int = 3) -> list[Candidate]:
    """The best candidates on different machines: within the limits by price, or by time if only the price is limited.

    Without limits, by the product of both.
    """

    def rank(item: Candidate) -> tuple[float, float, float]:
        failing = 0.0 if item.chance is None else round(max(0.0, 0.5 - item.chance), 3)
        if question.deadline is None and question.max_price is None:
            return failing, item.seconds * max(item.price, 1e-6), item.seconds
        if question.deadline is None:
            return failing, item.seconds, item.price
        return failing, item.price, item.seconds

    chosen: dict[tuple[str, str], Candidate] = {}
    for item in sorted(found, key=rank):
        chosen.setdefault((item.offer.machine.provider, str(item.offer.machine)), item)
        if len(chosen) == count:
            break
    return list(chosen.values())
