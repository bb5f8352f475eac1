"""A program that imports torch once and forks ranks on demand: what a rank costs is then its work, not its imports.

Reads one JSON object per line: {"module", "environments": [{...}, ...], "outputs": [[stdout path, stderr path], ...]}.
Answers each with two lines: the process ids, and when all have ended their exit codes (-N for signal N).

Started with the descriptor of a listening socket, it forks a copy of itself for each connection, which reads and
answers there: one for each worker of the tests.
"""

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

# Everything heavy that tasks import, and their own modules; torch's optimizers import torch._dynamo when first used.
import torch
import torch._dynamo
import torch.distributed

import task_images.allreduce.task
import task_images.bert_pretraining.task
import task_images.cifar10_resnet20.task
import task_images.digits_resnet.task
import task_images.epsilon_logistic_regression.task
import task_images.gpt_pretraining.task
import task_images.imagenet_resnet.task
import task_images.wmt17_transformer.task  # noqa: F401


def fork_rank(
    module: str, environment: dict[str, str], outputs: list[str], enter: Callable[[], None] | None = None
) -> int:
    """The process id of `module` as a rank; `enter` is called there first."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if enter is not None:
            enter()
        for descriptor, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.environ.clear()
        os.environ.update(environment)
        name, *sys.argv[1:] = module.split()
        sys.modules.pop(name, None)  # as in a process that has not imported it
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(orders: TextIO, answers: TextIO) -> None:
    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer("ready")
    for line in orders:
        job = json.loads(line)
        pids = [
            fork_rank(job["module"], environment, outputs)
            for environment, outputs in zip(job["environments"], job["outputs"], strict=True)
        ]
        answer(pids)
        answer([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


def fork_servers(listener: socket.socket) -> None:
    """Each copy ends with its connection, and this returns when the process that has started this one has ended."""
    parent = os.getppid()
    listener.settimeout(1.0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with connection, connection.makefile("r") as orders, connection.makefile("w") as answers:
                serve(orders, answers)
            os._exit(0)  # to unload torch takes a while
        connection.close()


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    if words:
        fork_servers(socket.socket(fileno=int(words[0])))
    else:
        serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
