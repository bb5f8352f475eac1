"""mlbench as on a Mac: `python -m tests.fakes.mac COMMAND...` in a process from which Linux is taken away.

What macOS' Python lacks is removed before anything of the project is imported: functions of os, signal, select and
fcntl, the files below /proc, /sys and /dev/shm, prctl and whatever else libc offers on Linux only. `sys.platform` is
"darwin". What a Mac has in addition is not there, except for the module that looks up proxies.
"""

import builtins
import ctypes
import fcntl
import functools
import os
import resource
import select
import selectors
import signal
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LINUX_ONLY: dict[types.ModuleType, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "sched_getparam", "sched_setscheduler", "pidfd_open"),
        *("memfd_create", "eventfd", "splice", "copy_file_range", "posix_fallocate", "posix_fadvise", "getrandom"),
        *("setns", "unshare", "fdatasync", "pipe2", "getxattr", "setxattr", "listxattr", "removexattr", "getresuid"),
        *("O_TMPFILE", "O_PATH", "O_DIRECT", "P_PIDFD", "MFD_CLOEXEC", "sched_rr_get_interval", "openpty2"),
    ),
    signal: ("sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGCLD", "SIGPOLL"),
    select: ("epoll", "EPOLLIN", "EPOLLOUT"),
    fcntl: (
        *("F_OFD_SETLK", "F_OFD_SETLKW", "F_OFD_GETLK", "F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_GET_SEALS"),
        *("F_SETLEASE", "F_GETLEASE", "F_SETSIG", "F_GETSIG", "F_NOTIFY"),
    ),
    socket: ("AF_NETLINK", "AF_PACKET", "AF_VSOCK", "SO_BINDTODEVICE", "SO_PASSCRED", "SO_PEERCRED", "SOCK_CLOEXEC"),
    resource: ("prlimit", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE"),
    time: ("CLOCK_BOOTTIME", "pthread_getcpuclockid"),
}
LINUX_FOLDERS = ("/proc", "/sys", "/dev/shm")
ROOT = str(Path(__file__).parents[2])
TESTS = "/dev/shm/tests-"  # begins the folder of the tests' files (tests/conftest.py)
# Functions of os that take a path first.
BY_PATH = ("open", "stat", "lstat", "listdir", "scandir", "access", "readlink", "chmod", "mkdir", "unlink", "rename")


def _is_linux_path(path: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    name = os.fsdecode(path)
    if name.startswith(TESTS):
        return False
    return any(name == folder or name.startswith(f"{folder}/") for folder in LINUX_FOLDERS)


def _hide_paths(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if _is_linux_path(path):
            if function is os_access:
                return False
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return function(path, *arguments, **options)

    return call


os_access = os.access
os_posix_spawn = os.posix_spawn


def _spawn_on_mac(path: str, words: Sequence[str], *arguments: Any, **options: Any) -> int:
    """Start a program; an agent, which is Python code on the command line, is on the Mac, too."""
    words = list(words)
    if "-c" in words:
        code = words.index("-c") + 1
        words[code] = (
            f"import sys; sys.path.append({ROOT!r}); import tests.fakes.mac as mac; mac.leave_linux(); {words[code]}"
        )
    return os_posix_spawn(path, words, *arguments, **options)


class _Libc:
    """libc without the functions of Linux."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")


def leave_linux() -> None:
    """Take away from this process what a Mac does not have."""
    for module, names in LINUX_ONLY.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in BY_PATH:
        setattr(os, name, _hide_paths(getattr(os, name)))
    builtins.open = _hide_paths(builtins.open)
    sys.modules["_scproxy"] = types.ModuleType("_scproxy")
    vars(sys.modules["_scproxy"]).update(_get_proxy_settings=dict, _get_proxies=dict)
    setattr(ctypes, "CDLL", _Libc)  # noqa: B010
    sysconfig.get_config_vars()  # reads a file that is named after the platform
    sys.platform = "darwin"
    setattr(selectors, "DefaultSelector", selectors.PollSelector)  # noqa: B010
    setattr(os, "posix_spawn", _spawn_on_mac)  # noqa: B010
    names = os.uname_result(("Darwin", os.uname().nodename, "25.0.0", "Darwin Kernel Version 25.0.0", "arm64"))
    os.uname = lambda: names


if __name__ == "__main__":
    leave_linux()
    from mlbench_cli.__main__ import main

    sys.argv = ["mlbench", *sys.argv[1:]]
    sys.exit(main())
