"""Predicted steps against real ones: layers that wait instead of computing, real gloo, a shaped network.

    python -m benchmarks.predict [--ranks N,N] [--methods METHOD,METHOD,...] [NETWORK ...]
    python -m benchmarks.predict --advice METHOD [--ranks N] [NETWORK]
    python -m benchmarks.predict --replay [--ranks N] [--methods METHOD,METHOD,...] [NETWORK ...]
    python -m benchmarks.predict --held-out SEED [--ranks N,N] [--turns N] [--record FILE]

With 2 and 4 ranks by default: the layers only wait, so that more ranks than cores are no part of it, either.
Every rank runs a model whose layers sleep, in forward and backward, so that the CPUs of this machine are no part of the
figure; the gradients travel by the methods of task_images/comm. The prediction gets the probe's round trip and goodput,
the sleeps as measured without communication, and what codecs compute; nothing is fitted. Prints one line per method
with the relative error. A method is a preset, or PRESET?AXIS=VALUE. With --advice, the first advice for a run of METHOD
is followed, and its predicted gain held against the measured one. The exit code is 1 if a step is predicted more than
15 % off.

With --replay, ResNet-20 trains by `mlbench run --preset throughput` over each network with each method, two ranks; each
run's step is predicted from its own calibration and held against the median of its ten timed blocks. Real computation,
real networks, nothing fitted to the steps. Prints a table with the load of each run, and the mean error; the exit code
is 1 if that is more than 5 %. Ten runs by default, some 8 minutes.

With --held-out, twelve methods drawn by SEED out of all that are simulated run on two networks, with 2 and 3 ranks. The
computation was timed on a third network. All of this is done in three turns, whose middle counts: a minute in which the
machine is busy spoils one turn of a method at most. The exit code is 1 if the mean error is above 8 %, or one above
15 %. About 25 minutes; each step is kept in build/held-out-SEED.jsonl as soon as it is measured, and not measured
again.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_cli.agent.network.namespaces import ShapingError
from mlbench_cli.agent.network.shaped import ShapedNetwork
from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import NetworkShape, parse_network, worker_address
from mlbench_cli.simulator.calibration import Calibration, read_codec
from mlbench_cli.simulator.collectives import GlooCollectives
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.predict import Scenario, advise
from mlbench_cli.simulator.step import check_method, simulate_step
from mlbench_cli.simulator.workload import Tensor, Workload
from task_images.comm.methods import Method
from task_images.comm.presets import PRESETS, resolve

ROOT = Path(__file__).parents[1]
SIZES = (40_000, 80_000, 160_000, 160_000, 80_000, 320_000, 160_000, 40_000)  # elements, in forward order
FORWARD, BACKWARD = 0.010, 0.020  # seconds of each layer
CODECS = "codecs"  # among names of methods: what those compute to compress gradients
METHODS = "noop,codecs,bsp,wfbp,fusion,mgwfbp,optfusion,bytescheduler,dear,fp16,ddp,bsp-ps,wfbp-ps,bytescheduler-ps"
NETWORKS = ("200mbit,20ms", "100mbit,5ms")
MAX_ERROR = 0.15
REPLAYED_NETWORKS = ("50mbit,10ms", "100mbit,5ms", "200mbit,20ms", "500mbit,5ms", "1gbit,5ms")
REPLAYED_METHODS = "bsp,mgwfbp"
MAX_REPLAY_ERROR = 0.05  # on average
HELD_OUT_COUNT, HELD_OUT_RANKS, HELD_OUT_MEAN = 12, "2,3", 0.08
CALIBRATED_NETWORK, HELD_OUT_NETWORKS = "100mbit,10ms", ("50mbit,10ms", "200mbit,20ms")
PERIOD = 4  # updates: methods that do not exchange in each do so every PERIOD
# What begins late begins at once, and what comes seldom comes every PERIOD updates.
SHORTENED = {
    "postlocalsgd": f"postlocalsgd?sync=postlocal:1,{PERIOD}",
    "diloco": f"diloco?steps={PERIOD}",
    "onebit-adam": "onebit-adam?warmup_steps=2",
}
ROWS = 200  # of each layer's matrix
WARM_UP, WARM_UP_OF_PLANS, STEPS = 2, 8, 8  # some methods measure updates before they make their plan
PORT = 29_511
TURNS = 3  # of a held-out test
MAX_SECONDS = 60  # of a method, before its ranks are killed


def work(names: list[str], scale: float, steps: int) -> None:
    """One rank, or a parameter server: the median over steps of the slowest rank's seconds, by method, and for
    asynchronous ones the slowest rank's mean; rank 0 prints each. For CODECS, what they compute. `scale` shortens
    layers and tensors alike."""
    import torch

    from task_images.comm.choose import make_strategy
    from task_images.comm.server import serve
    from task_images.contract import Contract
    from task_images.harness.codec_costs import measure_codecs
    from task_images.harness.distributed import open_world

    contract = Contract()
    if contract.role == "server":
        serve(contract)
        return

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(context, inputs, weight):  # type: ignore[no-untyped-def]
            time.sleep(scale * FORWARD)
            context.size = weight.shape
            return inputs + 0.0

        @staticmethod
        def backward(context, gradient):  # type: ignore[no-untyped-def]
            time.sleep(scale * BACKWARD)
            return gradient, torch.full(context.size, 1e-3)

    class Layer(torch.nn.Module):  # a module each, for without a barrier a module waits for its own parameters
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(ROWS, size // ROWS))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = Wait.apply(inputs, self.weight)
            return outputs

    world = open_world(contract)
    for name in names:
        if name == CODECS:
            costs = measure_codecs(world, [(ROWS, int(scale * size) // ROWS) for size in SIZES])
            if world.is_first:
                print("@step " + json.dumps([name, costs]), flush=True)
            continue
        method = find_method(name)
        strategy = make_strategy(method)
        measures_itself = method.plan in ("mgwfbp", "optimal") or method.order == "priority"
        skipped = WARM_UP_OF_PLANS if measures_itself else WARM_UP
        kind = torch.optim.AdamW if name.startswith("onebit-adam") else torch.optim.SGD
        model = strategy.attach(
            world,
            torch.nn.Sequential(*(Layer(int(scale * size)) for size in SIZES)),
            lambda module, kind=kind: kind(module.parameters(), lr=0.1),  # type: ignore[misc]
        )
        times = []
        world.barrier()  # and none between steps: without a barrier of their own, messages would travel during it
        begun = time.perf_counter()
        for _ in range(skipped + steps):
            inputs = torch.zeros(1, requires_grad=True)
            strategy.begin(1.0, float(world.size))
            with strategy.last_pass():
                model(inputs).sum().backward()
            strategy.step(0.1)
            ended = time.perf_counter()
            times.append(ended - begun)
            begun = ended
        with strategy.consensus():
            pass
        strategy.close()
        if method.staleness != "none":  # ranks that do not wait for each other: step N of one is not step N of another
            seconds = world.max([statistics.fmean(times[skipped:])])[0]
        else:
            # Methods that exchange every few updates: the mean over whole periods.
            middle = statistics.fmean if is_seldom(method) else statistics.median
            seconds = middle(world.max(times)[skipped:])
        if world.is_first:
            print("@step " + json.dumps([name, seconds]), flush=True)
    world.close()


def is_seldom(method: Method) -> bool:
    """Whether not every update has messages."""
    return method.sync != "every" or method.name in ("slowmo", "diloco")


def main(arguments: list[str]) -> int:
    """Measure and predict; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="as of mlbench run --network")
    parser.add_argument("--ranks", metavar="N,N", help="numbers of ranks; default: 2,4, and 2 with --replay")
    parser.add_argument("--methods", metavar="METHOD,METHOD", help="noop among them is the computation")
    parser.add_argument("--scale", type=float, default=1.0, help="of the layers' seconds and bytes; default: 1")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"that are timed of each method; default: {STEPS}")
    parser.add_argument("--replay", action="store_true", help="replay calibrated runs")
    parser.add_argument(
        "--held-out", type=int, metavar="SEED", help="methods drawn by SEED on networks not seen before"
    )
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of --held-out; default: {TURNS}")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of --held-out: steps that are measured already")
    parser.add_argument("--advice", metavar="METHOD", help="follow the first advice for a run of this method")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)  # one rank
    given = parser.parse_args(arguments)
    if given.work is not None:
        work(given.work[0].split(","), float(given.work[1]), int(given.work[2]))
        return 0
    if given.replay:
        return replay(given.networks or REPLAYED_NETWORKS, given.ranks or "2", given.methods or REPLAYED_METHODS)
    if given.held_out is not None:
        record = given.record or ROOT / "build" / f"held-out-{given.held_out}.jsonl"
        return hold_out(given.held_out, given.ranks or HELD_OUT_RANKS, given.scale, given.steps, given.turns, record)
    errors: list[float] = []
    for text in given.networks or NETWORKS:
        for ranks in map(int, (given.ranks or "2,4").split(",")):
            shape = parse_network(text)
            try:
                if given.advice is not None:
                    follow_advice(ranks, shape, given.advice)
                    continue
                names = (given.methods or METHODS).split(",")
                measured, link = measure(ranks, shape, names, given.scale, given.steps)
            except ShapingError as error:
                print(f"{ranks} ranks, {shape}: {error}", flush=True)
                errors.append(math.inf)
                continue
            computed, costs = measured.pop("noop", None), measured.pop(CODECS, [])
            errors += compare(measured, computed, GlooCollectives(ranks, link), given.scale, costs)
    return 1 if any(abs(error) > MAX_ERROR for error in errors) else 0


def hold_out(seed: int, ranks: str, scale: float, steps: int, turns: int, record: Path) -> int:
    """Time the computation on one network, and predict methods drawn by `seed` on two others; the exit code."""
    names, sizes = draw_methods(seed), [int(size) for size in ranks.split(",")]
    print(f"seed {seed}: {', '.join(names)}", flush=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    cases = [(CALIBRATED_NETWORK, size, ["noop", CODECS]) for size in sizes]
    cases += [(text, size, names) for text, size in itertools.product(HELD_OUT_NETWORKS, sizes)]
    begun = time.monotonic()
    for number, (turn, (text, size, wanted)) in enumerate(itertools.product(range(turns), cases)):
        key = [text, size, scale, steps, turn]
        known = {row["method"] for row in read_record(record) if row["case"] == key}
        if missing := [name for name in wanted if name not in known]:
            left = (time.monotonic() - begun) / number * (turns * len(cases) - number) if number else 0.0
            print(
                f"turn {turn + 1}: {text}, {size} ranks" + (f"; about {left:.0f} s left" if number else ""), flush=True
            )

            def keep(name: str, seconds: Any, link: Link, key: list[object] = key) -> None:
                row = {"case": key, "method": name, "seconds": seconds, "link": [link.alpha, link.beta]}
                with record.open("a") as file:
                    file.write(json.dumps(row) + "\n")

            try:
                measure(size, parse_network(text), missing, scale, steps, keep)
            except ShapingError as error:
                sys.exit(f"{error}\nThe steps so far are in {record}; run the same command again to go on.")
    errors = []
    for text, size in itertools.product(HELD_OUT_NETWORKS, sizes):
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in read_record(record):
            if row["case"][1:4] == [size, scale, steps] and row["case"][4] < turns:
                rows.setdefault((row["case"][0], row["method"]), []).append(row)
        computed = statistics.median(row["seconds"] for row in rows[CALIBRATED_NETWORK, "noop"])
        costs = find_middle([row["seconds"] for row in rows[CALIBRATED_NETWORK, CODECS]])
        for name in names:
            turned = rows[text, name]
            link = Link(*(statistics.median(row["link"][number] for row in turned) for number in (0, 1)))
            seconds = statistics.median(row["seconds"] for row in turned)
            errors += compare({name: seconds}, computed, GlooCollectives(size, link), scale, costs)
    mean, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))
    print(f"held out, {len(errors)} steps: mean absolute error {100 * mean:.1f} %, worst {100 * worst:.1f} %")
    return int(mean > HELD_OUT_MEAN or worst > MAX_ERROR)


def find_middle(turns: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What each codec costs in the median of the turns, which have the same rows."""
    return [
        {**rows[0], **{part: statistics.median(row[part] for row in rows) for part in ("before", "after")}}
        for rows in zip(*turns, strict=True)
    ]


def read_record(path: Path) -> list[dict[str, Any]]:
    """The steps in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw_methods(seed: int) -> list[str]:
    """Methods out of all that are simulated and send something."""
    known = []
    for name in PRESETS:
        try:
            check_method(resolve(name))
        except UsageError:
            continue
        if resolve(name).transport != "noop":
            known.append(SHORTENED.get(name, name))
    return random.Random(seed).sample(known, HELD_OUT_COUNT)


def replay(networks: Sequence[str], ranks: str, methods: str) -> int:
    """Run each method on each network, and print each step as measured and as predicted; the exit code."""
    words = ["--task", "digits_resnet", "--preset", "throughput", "--num-cpus", "1", "--no-pin"]
    errors = []
    with tempfile.TemporaryDirectory() as home:
        for network, method in itertools.product(networks, methods.split(",")):
            name = f"{method}-{network}".replace(",", "-")
            begun = time.monotonic()
            asked = ["--method", method, "--network", network, "--yes"]
            run_mlbench(home, "run", name, *ranks.split(","), *words, *asked)
            load, taken = os.getloadavg()[0], time.monotonic() - begun
            for workers in ranks.split(","):
                document = run_mlbench(home, "predict", "--check", f"{name}-{workers}", "-o", "json")
                (row,) = json.loads(document)["runs"]
                errors.append(row["error"])
                print(
                    f"{network:<13} {method:<12} {workers} ranks  measured {1000 * row['measured_seconds']:7.1f} ms  "
                    f"predicted {1000 * row['predicted_seconds']:7.1f} ms  {100 * row['error']:+6.1f} %  "
                    f"(all-reduces {100 * row['collectives_error']:.1f} % off; load {load:.1f}; {taken:.0f} s)",
                    flush=True,
                )
    sizes = [abs(error) for error in errors]
    mean = statistics.mean(sizes)
    print(
        f"{len(errors)} runs: mean absolute error {100 * mean:.1f} %, worst {100 * max(sizes):.1f} %, "
        f"mean with its sign {100 * statistics.mean(errors):+.1f} %"
    )
    return 1 if mean > MAX_REPLAY_ERROR else 0


def run_mlbench(home: str, *words: str) -> str:
    """What a command prints, with a store of its own. Ends this program with the command's error if it fails."""
    environment = {**os.environ, "MLBENCH_HOME": home}
    done = subprocess.run(
        [sys.executable, "-m", "mlbench_cli", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"mlbench {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def find_method(name: str) -> Method:
    """The method of PRESET or PRESET?AXIS=VALUE."""
    preset, _, change = name.partition("?")
    axis, _, value = change.partition("=")
    return resolve(preset, {axis: value} if change else {})


def measure(
    ranks: int,
    shape: NetworkShape,
    names: list[str],
    scale: float = 1.0,
    steps: int = STEPS,
    keep: Callable[[str, Any, Link], None] | None = None,
) -> tuple[dict[str, Any], Link]:
    """Seconds of a step by method on a shaped network, and the link that the probe has found. See `work`.
    `keep` gets each step as soon as it is measured."""
    network = ShapedNetwork(shape, ranks + count_servers(names))
    try:
        network.verify()
        report = network.document["probes"][0]
        links = report["links"]
        assert isinstance(links, list)
        rate = statistics.median(one["together_bits_per_second"] for one in links)
        trip = statistics.median(one["rtt_p50_seconds"] for one in links)
        load = os.getloadavg()[0]
        print(f"{ranks} ranks, {shape}: {rate / 1e6:.1f} Mbit/s, RTT {1000 * trip:.2f} ms; load {load:.1f}", flush=True)
        link = Link(trip / 2, 8 / rate)
        measured = {}
        for name, seconds in run_ranks(network, ranks, names, [str(scale), str(steps)]):
            measured[name] = seconds
            if keep is not None:
                keep(name, seconds, link)
    finally:
        network.close()
    return measured, link


def follow_advice(ranks: int, shape: NetworkShape, name: str) -> None:
    """Print the gain of the first advice, as predicted and as measured."""
    measured, link = measure(ranks, shape, ["noop", name])
    workload = make_workload(measured["noop"])
    calibration = Calibration(ranks, "gloo", ranks, 1, 1, workload, workload, workload, ())
    advised = advise(calibration, link, 0.0, Scenario(ranks, find_method(name)))
    best = next(advice for advice in advised if advice.command.startswith(("--method", "--network")))
    words = best.command.split()
    if words[0] == "--network":
        after, _ = measure(ranks, parse_network(words[1]), [name])
        seconds = after[name]
    else:
        changed = f"{words[1]}?{words[3].removeprefix('comm.')}" if len(words) > 2 else words[1]
        seconds = measure(ranks, shape, [changed])[0][changed]
    gain = measured[name] / seconds - 1
    print(
        f"{name} {1000 * measured[name]:.1f} ms; advice: {best.change}; predicted {1000 * best.seconds:.1f} ms, gain "
        f"{100 * best.gain:+.0f} %; measured {1000 * seconds:.1f} ms, gain {100 * gain:+.0f} %"
    )


def count_servers(names: list[str]) -> int:
    """How many parameter servers the methods need at most."""
    return max((find_method(name).server_count for name in names if name != CODECS), default=0)


def run_ranks(network: ShapedNetwork, ranks: int, names: list[str], sizes: list[str]) -> Iterator[tuple[str, Any]]:
    """Each method's seconds of a step, and the rows of CODECS, as rank 0 says them.

    Ends this program if the ranks fail or take too long.
    """
    processes = []
    servers = count_servers(names)
    for rank in range(ranks + servers):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MLBENCH_SERVERS": str(servers),
            "MLBENCH_ROLE": "trainer" if rank < ranks else "server",
            "MASTER_ADDR": worker_address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "MLBENCH_NETWORK": str(network.shape),
        }
        words = [sys.executable, "-m", "benchmarks.predict", "--work", ",".join(names), *sizes]
        processes.append(
            subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda rank=rank: network.enter_worker(rank),  # type: ignore[misc]
            )
        )
    said = processes[0].stdout
    assert said is not None
    watchdog = threading.Timer(60 + MAX_SECONDS * len(names), processes[0].kill)  # the others lose it, and end
    watchdog.start()
    found = 0
    try:
        for line in said:
            if line.startswith("@step "):
                name, seconds = json.loads(line.removeprefix("@step "))
                found += 1
                yield name, seconds
        if found < len(names):
            sys.exit(f"{ranks} ranks ended at {names[found]}, exit code {processes[0].wait()}; run it again to go on")
        for process in processes:
            process.wait(60)
    finally:
        watchdog.cancel()
        for process in processes:
            process.kill()


def make_workload(computed: float, scale: float = 1.0, costs: Sequence[Mapping[str, Any]] = ()) -> Workload:
    """The step of the waiting layers, which takes `computed` seconds without communication, and what codecs compute."""
    forward = computed * FORWARD / (FORWARD + BACKWARD)
    layer = (computed - forward) / len(SIZES)
    tensors = tuple(
        Tensor(str(number), 4 * ROWS * (int(scale * size) // ROWS), forward + (number + 1) * layer, ROWS)
        for number, size in enumerate(reversed(SIZES))
    )
    return Workload(tensors, forward, computed, codecs=tuple(map(read_codec, costs)))


def compare(
    measured: dict[str, float],
    computed: float | None,
    collectives: GlooCollectives,
    scale: float,
    costs: Sequence[Mapping[str, Any]] = (),
) -> list[float]:
    """Print each method's step as measured and as predicted from the step without communication; the errors."""
    workload = make_workload(computed or scale * len(SIZES) * (FORWARD + BACKWARD), scale, costs)
    errors = []
    for name, seconds in measured.items():
        predicted = simulate_step(workload, find_method(name), collectives).seconds
        errors.append(predicted / seconds - 1)
        print(
            f"{name:<16} measured {1000 * seconds:7.1f} ms  predicted {1000 * predicted:7.1f} ms  "
            f"{100 * errors[-1]:+6.1f} %"
        )
    mean, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))
    if len(errors) > 1:
        print(f"mean absolute error {100 * mean:.1f} %, worst {100 * worst:.1f} %", flush=True)
    return errors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
