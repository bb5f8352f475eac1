"""Where each rank's server listens: every rank tells rank 0, which tells all. TensorFlow wants to know it beforehand.

One line of JSON each way over a connection to MASTER_ADDR:MASTER_PORT.
"""

import json
import socket
import time
from contextlib import ExitStack, suppress

from task_images.contract import Contract
from task_images.harness.errors import EnvironmentUnfitError, PeerLostError
from task_images.harness.ranks import name_place

LINE = 1 << 20
PATIENCE = 5.0  # seconds for one line of somebody who has connected


def rendezvous(contract: Contract, port: int, seconds: float) -> list[str]:
    """ "host:port" of every rank, by rank; `port` is that of this rank. Raises PeerLostError after `seconds`."""
    addresses, links = meet(contract, port, seconds)
    for link in links.values():
        link.close()
    return addresses


def meet(contract: Contract, port: int, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    """The same, and the open connections by rank: rank 0's to all others, another rank's to rank 0."""
    deadline = time.monotonic() + seconds
    if contract.rank == 0:
        return _gather(contract, port, deadline, seconds)
    return _join(contract, port, deadline, seconds)


def _gather(
    contract: Contract, port: int, deadline: float, seconds: float
) -> tuple[list[str], dict[int, socket.socket]]:
    addresses = {0: name_place(contract, contract.node_rank, contract.master_addr, port)}
    waiting: dict[int, socket.socket] = {}
    with ExitStack() as stack, _listening(contract) as server:
        while len(addresses) < contract.world_size:
            missing = [rank for rank in range(contract.world_size) if rank not in addresses]
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise PeerLostError(
                    f"rank {', '.join(map(str, missing))} did not connect within {seconds:g} s",
                    "See the log of that rank for the cause.",
                ) from None
            message = _read(connection)
            rank, address = message.get("rank"), message.get("address")
            if rank not in missing or not isinstance(address, str):  # a port scan, or a rank of another run
                connection.close()
                continue
            addresses[rank], waiting[rank] = address, stack.enter_context(connection)
        everyone = [addresses[rank] for rank in range(contract.world_size)]
        for connection in waiting.values():
            connection.sendall(json.dumps({"addresses": everyone}).encode() + b"\n")
        stack.pop_all()
        return everyone, waiting


def _listening(contract: Contract) -> socket.socket:
    try:
        return socket.create_server(("", contract.master_port), backlog=contract.world_size)
    except OSError as error:
        raise EnvironmentUnfitError(
            f"port {contract.master_port} for the other ranks cannot be opened: {error.strerror}"
        ) from None


def _join(contract: Contract, port: int, deadline: float, seconds: float) -> tuple[list[str], dict[int, socket.socket]]:
    place = (contract.master_addr, contract.master_port)
    while time.monotonic() < deadline:
        with suppress(OSError), ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection(place, timeout=PATIENCE))
            address = name_place(contract, contract.node_rank, connection.getsockname()[0], port)
            connection.sendall(json.dumps({"rank": contract.rank, "address": address}).encode() + b"\n")
            addresses = _read(connection, max(0.01, deadline - time.monotonic())).get("addresses")
            if isinstance(addresses, list) and len(addresses) == contract.world_size:
                stack.pop_all()
                return [str(address) for address in addresses], {0: connection}
        time.sleep(0.1)  # rank 0 is not there yet
    raise PeerLostError(
        f"rank 0 did not answer at {contract.master_addr}:{contract.master_port} within {seconds:g} s",
        "See the log of rank 0 for the cause.",
    )


def _read(connection: socket.socket, seconds: float = PATIENCE) -> dict[str, object]:
    """The line that the other end sends; empty if it is not from our program."""
    connection.settimeout(seconds)
    raw = b""
    try:
        while not raw.endswith(b"\n") and len(raw) < LINE:
            block = connection.recv(4096)
            if not block:
                break
            raw += block
        message = json.loads(raw)
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}
