"""100,000 rows to a counting endpoint while processes of the run are killed at random, the owner included.

The same command is started again until it ends by itself. Then the output is audited (rows lost, rows twice), and the
endpoint's log: no call may be repeated whose outcome stood in a segment when a process was killed. That it stands there
1 s after the reply is a figure, which a busy machine misses.
`--every-calls N` kills by progress instead of by the clock; `--json` prints the audit alone, for a test to judge.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import harness
import rows
from local_endpoint import Call, Endpoint, running_endpoint

from batchmill.store.segments import format as segments
from batchmill.store.segments.files import SegmentFolder

ROW_BYTES = 600
RECORD_S = 1.0  # a reply this old is on disk
SEND_SLACK_S = 0.25  # a request sent before a kill may arrive so much later
LOOK_S = 0.05
RUN_TIMEOUT_S = 1800.0
UNEXPECTED_ENDS_MAX = 5
ZEROS = (  # of what is audited, what has to be none
    "rows_lost", "rows_twice", "rows_out_of_order", "rows_failed", "calls_repeated_wrongly", "calls_repeated_late"
)  # fmt: skip
ORPHAN_GRACE_S = 15.0


@dataclass(frozen=True)
class Kill:
    """A process that was ended with SIGKILL, when, in seconds since the epoch, and the rows that were safe by then."""

    at: float
    victim: str
    recorded: frozenset[int]
    looked_at: float  # when `recorded` had been read


@dataclass
class Story:
    """What happened on the way to the end of the run."""

    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    unexpected_ends: list[str] = field(default_factory=list)
    seen: dict[int, tuple[str, str]] = field(default_factory=dict)  # pid -> when it started, what it ran


@dataclass(frozen=True)
class Audit:
    """What the output and the endpoint's log say. All of it up to `unexpected_ends` has to be 0 or empty."""

    rows_lost: int
    rows_twice: int
    rows_out_of_order: int
    rows_failed: int
    calls_repeated_wrongly: int
    calls_repeated_late: int
    processes_left: int
    ledger_broken: list[str]
    unexpected_ends: list[str]
    rows: int
    calls: int
    calls_repeated: int
    rows_recorded: int  # when the last process was killed
    starts: int
    kills: dict[str, int]
    seconds: float


class Chaos:
    """Runs a command to its end, killing processes of its tree on the way."""

    def __init__(self, command: list[str], folder: Path, endpoint: Endpoint, arguments: argparse.Namespace) -> None:
        self.command, self.folder, self.endpoint, self.arguments = command, folder, endpoint, arguments
        self.rng = random.Random(arguments.seed)
        self.story = Story()
        self._calls_counted = self._bytes_counted = 0

    def run(self) -> Story:
        """Start the command until it ends by itself with status 0 or 3. Raises CommandFailed if it never does."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while time.monotonic() < deadline:
            self.story.starts += 1
            status = self.run_once(deadline)
            if status in (0, 3):
                return self.story
            if status != -signal.SIGKILL:
                log = (self.folder / f"log.{self.story.starts}").read_text(errors="replace")
                self.story.unexpected_ends.append(f"status {status}: {log[-1000:]}")
                if len(self.story.unexpected_ends) >= UNEXPECTED_ENDS_MAX:
                    break
        raise harness.CommandFailed(f"the run did not end:\n{self.story}")

    def run_once(self, deadline: float) -> int:
        """Start the command once, kill as is due, and return the status it ended with."""
        with (self.folder / f"log.{self.story.starts}").open("wb") as file:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            is_due = self.next_kill()
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                self.look_around(process.pid)
                if is_due() and len(self.story.kills) < self.arguments.kills:
                    self.kill_one(process.pid)
                    is_due = self.next_kill()
        finally:
            harness.end_group(process)
        return process.returncode

    def next_kill(self):
        """A function that says whether the next kill is due: after so many calls, or after so many seconds."""
        if self.arguments.every_calls:
            calls = self.count_calls() + self.arguments.every_calls
            return lambda: self.count_calls() >= calls
        at = time.monotonic() + self.rng.uniform(self.arguments.every_s_min, self.arguments.every_s_max)
        return lambda: time.monotonic() >= at

    def count_calls(self) -> int:
        """The calls that the endpoint has answered so far."""
        if self.endpoint.log.exists():
            with self.endpoint.log.open("rb") as file:
                file.seek(self._bytes_counted)
                piece = file.read()
            self._bytes_counted += len(piece)
            self._calls_counted += piece.count(b"\n")
        return self._calls_counted

    def look_around(self, root: int) -> None:
        """Remember every process of the tree, to see at the end that none is left."""
        for pid in harness.tree_of(root):
            if pid not in self.story.seen and (began := started_at(pid)):
                self.story.seen[pid] = (began, harness.name_of(pid))

    def kill_one(self, root: int) -> None:
        """End a process of the tree: every kind has the same chance, the owner too."""
        kinds: dict[str, list[int]] = defaultdict(list)
        for pid in harness.tree_of(root):
            kinds["owner" if pid == root else harness.name_of(pid)].append(pid)
        victim = self.rng.choice(sorted(kind for kind in kinds if kind))
        try:
            os.kill(self.rng.choice(kinds[victim]), signal.SIGKILL)
        except ProcessLookupError:
            return  # it ended by itself meanwhile
        at = time.time()
        recorded = frozenset(recorded_rows(self.folder / "data"))
        self.story.kills.append(Kill(at, victim, recorded, time.time()))


def recorded_rows(data_dir: Path) -> Iterator[int]:
    """The numbers of the rows whose outcomes stand in the segments."""
    for path in data_dir.glob("jobs/*/segments/*.seg"):
        for block in segments.salvage(SegmentFolder(path.parent), path.name):
            if isinstance(block, segments.Block):
                yield from block.rows()


def started_at(pid: int) -> str:
    """When a process started, in the kernel's ticks; with its id this names it for good. Empty: it is gone."""
    try:
        words = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]


def left_processes(story: Story) -> list[str]:
    """The processes of the run that are still there a while after its end; they are ended."""

    def left() -> list[int]:
        return [pid for pid, (began, _) in story.seen.items() if started_at(pid) == began]

    deadline = time.monotonic() + ORPHAN_GRACE_S
    while left() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    names = []
    for pid in left():
        names.append(story.seen[pid][1])
        os.kill(pid, signal.SIGKILL)
    return names


def read_ids(path: Path) -> list[str]:
    """The `custom_id` of every line; a line that is not JSON is an error."""
    if not path.exists():
        return []
    with path.open() as file:
        return [json.loads(line)["custom_id"] for line in file]


def is_excused(earlier: Call, kills: list[Kill]) -> bool:
    """Whether nobody got the reply, or a kill fell between the call and the moment its reply was safely recorded."""
    return earlier.reply is None or any(
        earlier.arrival - SEND_SLACK_S <= kill.at <= earlier.reply + RECORD_S for kill in kills
    )


def count_repeats(calls: list[Call], kills: list[Kill]) -> tuple[int, int, int]:
    """How many calls were repeated: in all, though their row was recorded, and although no kill excuses it."""
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    repeated = wrong = late = 0
    for key, made in by_key.items():
        made.sort(key=lambda call: call.arrival)
        row = int(key.removeprefix("row-"))
        safe_at = min((kill.looked_at for kill in kills if row in kill.recorded), default=math.inf)
        repeated += len(made) - 1
        wrong += sum(call.arrival > safe_at for call in made)
        late += sum(not is_excused(earlier, kills) for earlier in made[:-1])
    return repeated, wrong, late


def verify_ledger(data_dir: Path) -> list[str]:
    """What `batchmill ledger verify` finds broken in the one job of a data directory."""

    def ask(*words: str) -> dict:
        command = [harness.BATCHMILL, *words, "--data-dir", data_dir, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.stdout:
            raise harness.CommandFailed(f"{words} said nothing: {done.stderr}")
        return json.loads(done.stdout.splitlines()[0])

    return ask("ledger", "verify", ask("jobs")["job"]["id"])["report"]["broken"]


def audit(source: Path, output: Path, calls: list[Call], story: Story, seconds: float) -> Audit:
    """Compare the output with the input, and the calls with the kills."""
    wanted, written = read_ids(source), read_ids(output)
    failed = read_ids(output.with_name(output.stem + ".errors.jsonl"))
    repeated, wrong, late = count_repeats(calls, story.kills)
    victims = [kill.victim for kill in story.kills]
    return Audit(
        rows_lost=len(set(wanted) - set(written) - set(failed)),
        rows_twice=len(written) + len(failed) - len(set(written) | set(failed)),
        rows_out_of_order=sum(a != b for a, b in zip(wanted, written, strict=False)) if not failed else 0,
        rows_failed=len(failed),
        calls_repeated_wrongly=wrong,
        calls_repeated_late=late,
        processes_left=len(left_processes(story)),
        ledger_broken=verify_ledger(output.parent / "data"),
        unexpected_ends=story.unexpected_ends,
        rows=len(wanted),
        calls=len(calls),
        calls_repeated=repeated,
        rows_recorded=max((len(kill.recorded) for kill in story.kills), default=0),
        starts=story.starts,
        kills={victim: victims.count(victim) for victim in sorted(set(victims))},
        seconds=seconds,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--every-s-min", type=float, default=1.0)
    parser.add_argument("--every-s-max", type=float, default=4.0)
    parser.add_argument("--every-calls", type=int, default=0, help="kill each time so many calls were answered")
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder that gets the run's files")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run_story(source: Path, folder: Path, arguments: argparse.Namespace) -> Audit:
    """Run the file through the endpoint under fire, and audit it."""
    output = folder / "out.jsonl"
    began = time.monotonic()
    with running_endpoint(folder, arguments.delay_ms) as endpoint:
        words = [harness.BATCHMILL, "run", source, "--model", "openai:bench", "--base-url", endpoint.base_url]
        words += ["--in-flight", arguments.in_flight, "-o", output, "--data-dir", folder / "data"]
        story = Chaos([str(word) for word in words], folder, endpoint, arguments).run()
        seconds = time.monotonic() - began
        return audit(source, output, endpoint.calls(), story, seconds)


def main() -> None:
    """Run, audit, print."""
    arguments = parse_arguments()
    source = rows.chat_rows(arguments.rows, ROW_BYTES)
    if arguments.keep:
        arguments.keep.mkdir(parents=True)
        found = run_story(source, arguments.keep, arguments)
    else:
        with harness.work_folder() as folder:
            found = run_story(source, folder, arguments)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    print(f"{found.rows:,} rows, {sum(found.kills.values())} kills {found.kills}, {found.starts} starts, ", end="")
    print(f"{found.seconds:.0f} s; {found.calls:,} calls, {found.calls_repeated:,} of them repeats that a kill excuses")
    for name in ZEROS:
        value = getattr(found, name)
        print(f"=> {name.replace('_', ' ')}: {value}; aim: 0: {harness.verdict(value == 0)}")
    print(f"=> processes left behind: {found.processes_left}; aim: 0: {harness.verdict(found.processes_left == 0)}")
    print(f"=> ledger verify: {found.ledger_broken or 'sound'}")
    for end in found.unexpected_ends:
        print(f"ended by itself, unfinished: {end}")


if __name__ == "__main__":
    main()
