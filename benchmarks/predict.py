"""Predicted steps against real ones: layers that wait instead of computing, real gloo, a shaped network.

    python -m benchmarks.predict [RANKS] [NETWORK] [METHOD,METHOD,...]
    python -m benchmarks.predict --advice [RANKS] [NETWORK] [METHOD]

Every rank runs a model whose layers sleep, in forward and backward, so that the CPUs of this machine are no part of the
figure; the gradients travel by the methods of task_images/comm. The prediction gets the probe's round trip and goodput
and the sleeps as measured without communication; nothing is fitted. Prints one line per method with the relative error.
A method is a preset, or PRESET?AXIS=VALUE. With --advice, the first advice for a run of METHOD is followed, and its
predicted gain held against the measured one.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from mlbench_cli.engines.local.network.shaped import ShapedNetwork
from mlbench_cli.network import NetworkShape, parse_network, worker_address
from mlbench_cli.simulator.calibration import Calibration
from mlbench_cli.simulator.collectives import GlooCollectives
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.predict import Scenario, advise
from mlbench_cli.simulator.step import simulate_step
from mlbench_cli.simulator.workload import Tensor, Workload
from task_images.comm.methods import Method
from task_images.comm.presets import resolve

ROOT = Path(__file__).parents[1]
SIZES = (40_000, 80_000, 160_000, 160_000, 80_000, 320_000, 160_000, 40_000)  # elements, in forward order
FORWARD, BACKWARD = 0.010, 0.020  # seconds of each layer
METHODS = "noop,bsp,wfbp,fusion,mgwfbp,optfusion,bytescheduler,dear,fp16,ddp"
WARM_UP, STEPS = 3, 9
PORT = 29_511


def work(names: list[str]) -> None:
    """One rank: the median over steps of the slowest rank's seconds, by method; rank 0 prints them."""
    import torch

    from task_images.comm.base import Placement
    from task_images.comm.choose import make_strategy
    from task_images.contract import Contract
    from task_images.harness.distributed import open_world

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(context, inputs, weight):  # type: ignore[no-untyped-def]
            time.sleep(FORWARD)
            context.size = weight.shape
            return inputs + 0.0

        @staticmethod
        def backward(context, gradient):  # type: ignore[no-untyped-def]
            time.sleep(BACKWARD)
            return gradient, torch.full(context.size, 1e-3)

    class Waiting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.zeros(size) for size in SIZES])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                inputs = Wait.apply(inputs, weight)
            return inputs

    world = open_world(Contract())
    found = {}
    for name in names:
        strategy = make_strategy(find_method(name))
        model = strategy.attach(
            Placement(world), Waiting(), lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
        )
        times = []
        for _ in range(WARM_UP + STEPS):
            inputs = torch.zeros(1, requires_grad=True)
            world.barrier()
            begun = time.perf_counter()
            strategy.begin(1.0, float(world.size))
            with strategy.last_pass():
                model(inputs).sum().backward()
            strategy.step(0.1)
            times.append(time.perf_counter() - begun)
        with strategy.consensus():
            pass
        strategy.close()
        found[name] = statistics.median(world.max(times)[WARM_UP:])
    if world.is_first:
        print("@steps " + json.dumps(found), flush=True)
    world.close()


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--work"]:
        work(arguments[1].split(","))
        return
    wants_advice = arguments[:1] == ["--advice"]
    arguments = arguments[wants_advice:]
    ranks = int(arguments[0]) if arguments else 2
    shape = parse_network(arguments[1] if len(arguments) > 1 else "200mbit,5ms")
    if wants_advice:
        follow_advice(ranks, shape, arguments[2] if len(arguments) > 2 else "bsp")
        return
    names = (arguments[2] if len(arguments) > 2 else METHODS).split(",")
    measured, link = measure(ranks, shape, names)
    compare(measured, GlooCollectives(ranks, link))


def find_method(name: str) -> Method:
    """The method of PRESET or PRESET?AXIS=VALUE."""
    preset, _, change = name.partition("?")
    axis, _, value = change.partition("=")
    return resolve(preset, {axis: value} if change else {})


def measure(ranks: int, shape: NetworkShape, names: list[str]) -> tuple[dict[str, float], Link]:
    """Seconds of a step by method on a shaped network, and the link that the probe has found."""
    network = ShapedNetwork(shape, ranks)
    try:
        network.verify()
        report = network.document["probes"][0]
        measured = run_ranks(network, ranks, names)
    finally:
        network.close()
    links = report["links"]
    assert isinstance(links, list)
    rate = statistics.median(link["together_bits_per_second"] for link in links)
    trip = statistics.median(link["rtt_p50_seconds"] for link in links)
    print(f"{ranks} ranks, {shape}: {rate / 1e6:.1f} Mbit/s, RTT {1000 * trip:.2f} ms; load {os.getloadavg()[0]:.1f}")
    return measured, Link(trip / 2, 8 / rate)


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


def run_ranks(network: ShapedNetwork, ranks: int, names: list[str]) -> dict[str, float]:
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": worker_address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "MLBENCH_NETWORK": str(network.shape),
        }
        words = [sys.executable, "-m", "benchmarks.predict", "--work", ",".join(names)]
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
    text, _ = processes[0].communicate(timeout=600)
    for process in processes:
        process.wait(60)
    line = next(line for line in text.splitlines() if line.startswith("@steps "))
    found: dict[str, float] = json.loads(line.removeprefix("@steps "))
    return found


def make_workload(computed: float) -> Workload:
    """The step of the waiting layers, which takes `computed` seconds without communication."""
    forward = computed * FORWARD / (FORWARD + BACKWARD)
    layer = (computed - forward) / len(SIZES)
    tensors = tuple(
        Tensor(str(number), 4 * size, forward + (number + 1) * layer) for number, size in enumerate(reversed(SIZES))
    )
    return Workload(tensors, forward, computed)


def compare(measured: dict[str, float], collectives: GlooCollectives) -> None:
    """Print each method's step as measured and as predicted from the step without communication."""
    workload = make_workload(measured.get("noop", len(SIZES) * (FORWARD + BACKWARD)))
    errors = []
    for name, seconds in measured.items():
        if name == "noop":
            continue
        predicted = simulate_step(workload, find_method(name), collectives).seconds
        errors.append(abs(predicted / seconds - 1))
        error = 100 * (predicted / seconds - 1)
        print(f"{name:<16} measured {1000 * seconds:7.1f} ms  predicted {1000 * predicted:7.1f} ms  {error:+6.1f} %")
    print(f"mean absolute error {100 * statistics.mean(errors):.1f} %, worst {100 * max(errors):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
