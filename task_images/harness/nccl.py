"""Facts about NCCL or AMD's RCCL: version, variables, and the network that it chose.

With NCCL_DEBUG=INFO, NCCL logs its choices. `log_to` directs the log to the rank's output folder unless the user has
chosen otherwise; `describe` reads it after the first collective.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

LOG = "nccl.log"
FABRIC = "MLBENCH_FABRIC"  # "GBITS NAME" of the machine's fast network, from the cluster's record
MAX_LOG_BYTES = 1 << 20

# "Using network IB", "NET/Socket : Using [0]eth0:10.0.0.1<0>", "... -> 1[0] [send] via NET/IB/0/GDRDMA"
_CHOSEN = re.compile(r"Using network (\S+(?: \S+)?)$", re.MULTILINE)
_PLUGIN = re.compile(r"NET/(\w+)\s*: Using (.*\[\d+\].+)")  # without a number there is no interface
_VIA = re.compile(r"\bvia (NET/(?:AWS )?\w+|P2P/\w+|SHM/?\w*)(?:/\d+)?(/GDRDMA)?")
# "AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}": on rank 0 with NCCL_DEBUG_SUBSYS=TUNING,
# since NCCL 2.24.3, for each launch.
_CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_CHANNELS = re.compile(r"(\d+) coll channels\b.*? (\d+) p2p channels\b(?! per peer)")
_VERSION = re.compile(r"[NR]CCL version(?: :)? (\S+)")  # AMD's RCCL: "RCCL version : 2.22.3-develop:8fdb8c0"


def log_to(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Have NCCL log its choices to `folder`, unless the user has set another place."""
    if "NCCL_DEBUG_FILE" in environ or environ.get("NCCL_DEBUG", "INFO") != "INFO":
        return
    environ["NCCL_DEBUG"] = "INFO"
    environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV")
    environ["NCCL_DEBUG_FILE"] = str(folder / LOG)


def describe(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """For the result: NCCL's variables, the network in its log, and the machine's network.

    `nominal_gbits` is the bandwidth of the machine's fast network in Gbit/s, `fabric` its name. Empty entries are
    omitted.
    """
    variables = {name: value for name, value in sorted(environ.items()) if name.startswith(("NCCL_", "RCCL_"))}
    facts: dict[str, object] = {"variables": variables}
    gbits, _, name = environ.get(FABRIC, "").partition(" ")
    if gbits.isdecimal():
        facts |= {"fabric": name, "nominal_gbits": int(gbits)}
    try:
        with open(environ.get("NCCL_DEBUG_FILE", ""), encoding="utf-8", errors="replace") as file:
            facts |= parse_log(file.read(MAX_LOG_BYTES))
    except OSError:
        pass
    return facts


def parse_log(text: str) -> dict[str, object]:
    """version, network (IB, Socket, a plugin's name), interfaces, transports and number of channels, and NCCL's
    algorithm, protocol and channels for each collective and size in bytes, as far as logged."""
    chosen, plugin, version = _CHOSEN.findall(text), _PLUGIN.search(text), _VERSION.search(text)
    network = chosen[-1] if chosen else plugin[1] if plugin else None  # the last of several attempts counts
    ways = sorted({way + direct for way, direct in _VIA.findall(text)})
    choices = {
        (name, int(size)): {"algorithm": algorithm, "protocol": protocol, "channels": int(last) - int(first) + 1}
        for name, size, algorithm, protocol, first, last in _CHOICE.findall(text)
    }
    channels = _CHANNELS.search(text)
    found = {
        "version": version[1] if version else None,
        "network": network,
        "interfaces": plugin[2].strip() if plugin else None,
        "ways": ways or None,
        "channels": {"collective": int(channels[1]), "p2p": int(channels[2])} if channels else None,
        "choices": [{"collective": name, "bytes": size, **choice} for (name, size), choice in sorted(choices.items())]
        or None,
    }
    return {name: value for name, value in found.items() if value is not None}
