"""Where each rank's server listens: every rank tells rank 0, which tells all. TensorFlow wants to know it beforehand.

Over a connection to MASTER_ADDR:MASTER_PORT a rank sends the line "RANK HOST:PORT", and gets the places of all ranks.
"""

import socket
import time
from contextlib import ExitStack, suppress

from task_images.contract import Contract
from task_images.errors import EnvironmentUnfitError, PeerLostError
from task_images.network import Line
from task_images.ranks import name_place

PATIENCE = 5.0  # seconds for an attempt to connect


def rendezvous(contract: Contract, port: int, seconds: float) -> list[str]:
    """ "host:port" of every rank, by rank; `port` is that of this rank. Raises PeerLostError after `seconds`."""
    addresses, links = meet(contract, port, seconds)
    for link in links.values():
        link.close()
    return addresses


def meet(contract: Contract, port: int, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    """The same, and the open connections by rank: rank 0's to all others, another rank's to rank 0."""
    return (_join if contract.rank else _gather)(contract, port, seconds)


def _gather(contract: Contract, port: int, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    deadline = time.monotonic() + seconds
    addresses = {0: name_place(contract, contract.node_rank, contract.master_addr, port)}
    lines: dict[int, Line] = {}
    with ExitStack() as stack, _listening(contract) as server:
        while missing := [rank for rank in range(contract.world_size) if rank not in addresses]:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line = Line(server.accept()[0])
            except TimeoutError:
                raise PeerLostError(
                    f"rank {', '.join(map(str, missing))} did not connect within {seconds:g} s",
                    "See the log of that rank for the cause.",
                ) from None
            with suppress(OSError, ValueError):
                rank, _, address = line.read().partition(" ")
                if int(rank) in missing:
                    addresses[int(rank)], lines[int(rank)] = address, line
                    stack.callback(line.close)
                    continue
            line.close()  # a port scan, or a rank of another run
        everyone = [addresses[rank] for rank in range(contract.world_size)]
        for line in lines.values():
            line.write(" ".join(everyone))
        stack.pop_all()
        return everyone, {rank: line.socket for rank, line in lines.items()}


def _listening(contract: Contract) -> socket.socket:
    try:
        return socket.create_server(("", contract.master_port), backlog=contract.world_size)
    except OSError as error:
        raise EnvironmentUnfitError(
            f"port {contract.master_port} for the other ranks cannot be opened: {error.strerror}"
        ) from None


def _join(contract: Contract, port: int, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    place, deadline = (contract.master_addr, contract.master_port), time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError, ValueError), ExitStack() as stack:
            line = Line(socket.create_connection(place, timeout=min(left, PATIENCE)))
            stack.callback(line.close)
            address = name_place(contract, contract.node_rank, line.socket.getsockname()[0], port)
            line.write(f"{contract.rank} {address}")
            line.socket.settimeout(left)
            addresses = line.read().split()
            if len(addresses) == contract.world_size:
                stack.pop_all()
                return addresses, {0: line.socket}
        time.sleep(0.1)  # rank 0 is not there yet
    raise PeerLostError(
        f"rank 0 did not answer at {contract.master_addr}:{contract.master_port} within {seconds:g} s",
        "See the log of rank 0 for the cause.",
    )
