"""A login node in memory: files by path, and what commands answer."""

from collections.abc import Sequence
from typing import Any, cast

from mlbench_cli.agent.channel import Channel, Target
from mlbench_cli.engines.slurm.controller import Answer


class Login:
    """Answers "run" with the first of `answers` whose words are all in the command, else with an empty success."""

    def __init__(self, *answers: tuple[str, Answer], files: dict[str, str] | None = None) -> None:
        self.answers = list(answers)
        self.files = {path: text.encode() for path, text in (files or {}).items()}
        self.commands: list[list[str]] = []
        self.waits: list[tuple[float, float]] = []  # limit of each command, and of the call that asks for it
        self.target = Target("me@login", "python3", None)
        self.host: dict[str, Any] = {"home": "/home/me"}

    @property
    def channel(self) -> Channel:
        """Itself, as the type that the product wants."""
        return cast(Channel, self)

    def call(self, do: str, data: bytes = b"", **arguments: Any) -> dict[str, Any]:
        """What `Channel.call` gives for the requests that Slurm's modules make."""
        if do == "run":
            self.waits.append((arguments["timeout"], arguments["seconds"]))
            return self._run(arguments["argv"])
        if do == "get":
            found = self.files.get(arguments["path"])
            return {"size": None if found is None else len(found)}
        if do == "put":
            self.files[arguments["path"]] = data
        return self.host

    def exchange(self, do: str, data: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """A file with its size."""
        found = self.files.get(arguments["path"])
        if found is None:
            return {"size": None}, b""
        begin = arguments.get("offset", 0)
        return {"size": len(found)}, found[begin : begin + arguments.get("size", len(found))]

    def _run(self, argv: Sequence[str]) -> dict[str, Any]:
        self.commands.append(list(argv))
        for words, answer in self.answers:
            if set(words.split()) <= set(argv):
                return {"code": answer.code, "out": answer.out, "err": answer.err}
        return {"code": 0, "out": "", "err": ""}
