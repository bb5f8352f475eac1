"""Measures each pair of ranks separately and finds slow nodes and links (pairs.py)."""

import time
from typing import Any

import torch
import torch.distributed as dist

from task_images.allreduce.operations import exchange_messages
from task_images.allreduce.pairs import Pair, Verdict, is_certain, judge_pairs, make_rounds
from task_images.harness.distributed import World
from task_images.harness.report import Reporter
from task_images.harness.tracker import Tracker

SAMPLES = 5  # of which the least counts: a slow link is slow every time, a busy moment passes
MAX_PASSES = 12  # until what looks slow is certain


def search(world: World, tracker: Tracker, report: Reporter, size: int) -> dict[str, Any]:
    """Exchange `size` bytes both ways in each pair of ranks, all pairs of a round at once, and judge. Collective.

    Returns what the result's details say: seconds by pair, the verdict, and the hosts that it names.
    """
    passes: list[dict[Pair, float]] = []
    while True:
        passes.append(_measure_rounds(world, tracker, size))
        seconds = {pair: min(each[pair] for each in passes) for pair in passes[0]}
        verdict = judge_pairs(seconds, world.size)
        if verdict.kind in ("none", "cannot_tell") or is_certain(passes, verdict.slow, world.size):
            break
        if len(passes) == MAX_PASSES:
            reason = f"too many pairs are slow only in some of {MAX_PASSES} passes"
            verdict = Verdict("cannot_tell", (), verdict.slow, reason)
            break
    hosts = _hosts(world)
    named = [f"rank {rank}" + (f" on {hosts[rank]}" if hosts else "") for rank in verdict.ranks]
    report.say(f"pairs of ranks: {verdict.kind.replace('_', ' ')}: {', '.join(named) or verdict.reason}")
    return {
        "bytes": size,
        "rounds": len(make_rounds(world.size)),
        "passes": len(passes),
        "seconds": {f"{a}-{b}": value for (a, b), value in sorted(seconds.items())},
        "verdict": verdict.to_dict(),
        "reason": verdict.reason,
        "hosts": hosts,
    }


def _measure_rounds(world: World, tracker: Tracker, size: int) -> dict[Pair, float]:
    """Seconds of each pair: the slower one of both sides."""
    send = torch.ones(size, dtype=torch.uint8, device=world.device)
    result = torch.empty_like(send)
    found: dict[Pair, float] = {}
    for pairs in make_rounds(world.size):
        partner = next((sum(pair) - world.rank for pair in pairs if world.rank in pair), None)
        own = float("inf")
        for number in range(SAMPLES + 1):
            world.barrier()
            with tracker.section("communication"):
                begun = time.perf_counter()
                if partner is not None:
                    both = [dist.P2POp(dist.isend, send, partner), dist.P2POp(dist.irecv, result, partner)]
                    exchange_messages(both)
                world.synchronize()
                if number:  # the first one makes the connection
                    own = min(own, time.perf_counter() - begun)
        times = [row[0] for row in world.gather([own])]
        found |= {(a, b): max(times[a], times[b]) for a, b in pairs}
    return found


def _hosts(world: World) -> list[str]:
    """The host of each rank; empty if they are not known."""
    hosts, each = world.contract.hosts, world.contract.local_world_size
    return [hosts[rank // each] for rank in range(world.size)] if len(hosts) * each == world.size else []
