"""Pages read as sessions: files that they show, commands that they give, and what they say is printed.

A fenced block below `<!-- file: NAME -->` is a file; a ```console block holds commands after `$ ` (with `> ` for what
follows of the same command) and, below each, lines that must be printed in this order, among others. `…` stands for
anything; numbers of seconds, job ids and the folder HOME may differ from what the page shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fakes.preloaded import IS_ENABLED, PRELOADED

HOME = "/home/ada"
JOB_ID = re.compile(r"job_[0-9a-f]{4,20}\b")
FULL_ID_CHARS = len("job_") + 20
MARK = "@@exit "
LINE_BYTES_MAX = 16 * 1024 * 1024

_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_VARYING = re.compile(r"(?P<any>…)|(?P<seconds>\b\d[\d.]* s\b)|(?P<job>job_[0-9a-f]{20}\b)|(?P<space>\s+)")


@dataclass
class Step:
    """One command and what its page says of it, or a file (then `command` is empty)."""

    command: str = ""
    expected: list[str] = field(default_factory=list)
    file: str = ""
    text: str = ""


def read_page(text: str) -> list[Step]:
    """The files and commands of a page, in order."""
    steps: list[Step] = []
    for block in _BLOCK.finditer(text):
        if block["file"]:
            steps.append(Step(file=block["file"], text=block["text"]))
        elif block["kind"] == "console":
            steps += _commands(block["text"])
    return steps


def _commands(text: str) -> list[Step]:
    steps: list[Step] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append(Step(line[2:]))
            continue
        assert steps, f"a console block begins with a command, not with {line!r}"
        last = steps[-1]
        if not last.expected and (line.startswith("> ") or last.command.endswith("\\")):
            last.command += "\n" + line.removeprefix("> ")
        elif line.strip():
            last.expected.append(line)
    return steps


class Session:
    """A shell in a folder of its own that is told one command after the other."""

    def __init__(
        self, folder: Path, environ: dict[str, str], addresses: dict[str, str], *, is_preloaded: bool = True
    ) -> None:
        """With `is_preloaded`, `batchmill` is a fork of a process that has imported it: see `fakes/preloaded.py`."""
        self._folder, self._environ, self._addresses = folder, environ, addresses
        self._programs = tempfile.TemporaryDirectory(prefix="page-programs-")
        if is_preloaded and IS_ENABLED:
            PRELOADED.write_script(Path(self._programs.name))
            path = environ.get("PATH", os.environ["PATH"])
            self._environ = {**environ, "PATH": f"{self._programs.name}{os.pathsep}{path}"}
        self._ids: dict[str, str] = {}  # as the page shows it -> as it is
        self._exit_code = 0

    async def __aenter__(self) -> Session:
        pipe = asyncio.subprocess.PIPE
        self._shell = await asyncio.create_subprocess_exec(
            "bash", "--norc", cwd=self._folder, env={**os.environ, **self._environ},
            stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, limit=LINE_BYTES_MAX, start_new_session=True,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        await self._shell.wait()
        with contextlib.suppress(ProcessLookupError):  # what a page started beside itself and did not end
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._programs.cleanup()

    async def follow(self, steps: list[Step]) -> None:
        """Do what a page says. A command that does not exit with 0 must be followed by `echo $?`."""
        for step in steps:
            if step.file:
                path = self._folder / step.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._addressed(step.text))
                continue
            assert not self._exit_code or step.command == "echo $?", (
                f"exit code {self._exit_code}, of which the page says nothing, before {step.command!r}"
            )
            printed = await self._run(self._real(step.command))
            self._compare(step, printed)
        assert not self._exit_code, f"the last command of the page exits with {self._exit_code}"

    async def _run(self, command: str) -> list[str]:
        """What a command prints; the shell's `$?` is as it left it."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        result = f'{{ {command}\n}} </dev/null; code=$?; printf "\\n{MARK}%s\\n" $code; (exit $code)\n'
        self._shell.stdin.write(result.encode())
        printed: list[str] = []
        while line := (await self._shell.stdout.readline()).decode():
            if line.startswith(MARK):
                self._exit_code = int(line.removeprefix(MARK))
                return printed
            printed.append(line.strip())
        raise AssertionError("the shell ended:\n" + "\n".join(printed))

    def _real(self, command: str) -> str:
        return JOB_ID.sub(self._real_id, self._addressed(command).replace(HOME, str(self._folder)))

    def _addressed(self, text: str) -> str:
        """With the addresses of this session. In one pass: a port may hold the digits of another that is shown."""
        shown = "|".join(re.escape(one) for one in sorted(self._addresses, key=len, reverse=True))
        return re.sub(shown, lambda match: self._addresses[match[0]], text) if shown else text

    def _real_id(self, shown: re.Match[str]) -> str:
        found = [real for known, real in self._ids.items() if known.startswith(shown[0])]
        assert len(found) == 1, f"no command above printed the id {shown[0]}"
        return found[0][: len(shown[0])]

    def _compare(self, step: Step, printed: list[str]) -> None:
        at = 0
        for line in step.expected:
            pattern = self._pattern(line)
            while at < len(printed) and not (found := pattern.fullmatch(printed[at])):
                at += 1
            result = f"{line!r} is not printed (in this order) by {step.command!r}, but:\n" + "\n".join(printed)
            assert at < len(printed), result
            for shown, real in zip(_new_ids(line, self._ids), found.groups(), strict=True):
                self._ids[shown] = real
            at += 1

    def _pattern(self, line: str) -> re.Pattern[str]:
        """What a printed line must look like; an id that is new on the page becomes a group."""
        pattern, at = "", 0
        line = line.strip()
        fresh = _new_ids(line, self._ids)
        for found in _VARYING.finditer(line):
            pattern += re.escape(line[at : found.start()])
            at = found.end()
            match found.lastgroup:
                case "any":
                    pattern += ".*"
                case "seconds":
                    pattern += r"\d[\d.]* \w+"
                case "space":
                    pattern += r"\s+"
                case _:
                    is_first = found[0] in fresh
                    pattern += r"(job_[0-9a-f]{20})" if is_first else re.escape(self._ids.get(found[0], ""))
        pattern += re.escape(line[at:])
        return re.compile(pattern.replace(re.escape(HOME), re.escape(str(self._folder))))


def _new_ids(line: str, known: dict[str, str]) -> list[str]:
    return [each for each in JOB_ID.findall(line) if len(each) == FULL_ID_CHARS and each not in known]
