"""A driver that runs pieces of work on a cluster: `python task_runs.py ADDRESS CACHE FOLDER`.

Prints what the owner would get, one line each.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import ray

from batchmill import __version__
from batchmill.executors.ray import frames
from batchmill.executors.ray.bytes_only import install, verify
from batchmill.executors.ray.frames import NodeStore, RunTask, TaskEnded, TaskOrder
from batchmill.executors.ray.task_runs import REPLY_BYTES_MAX, TaskRuns
from batchmill.owner_term import ENDLESS, PrefixTerm, TermFile, now_s
from batchmill.types.connectors import Storage

GONE_S = 30.0
TERM_S = 3.0


def order_of(number: int, target: str, order: str, term: str = "") -> RunTask:
    node = NodeStore(Storage(f"file://{sys.argv[3]}"), sys.argv[2], 2**20, "/data-of-the-owner")
    packed = TaskOrder(f"node_work:{target}", order.encode(), [], node, __version__)
    return RunTask(number, frames.encode(packed), term)


async def until(path: Path) -> None:
    async with asyncio.timeout(GONE_S):
        while not path.exists():
            await asyncio.sleep(0.02)


async def pid_in(path: Path) -> int:
    await until(path)
    return int(path.read_text())


async def is_gone(pid: int) -> bool:
    ends = time.monotonic() + GONE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < ends:
        await asyncio.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


async def main() -> None:
    install()
    ray.init(address=sys.argv[1], log_to_driver=False)
    verify(ray)
    told: asyncio.Queue[TaskEnded] = asyncio.Queue()
    runs, folder, term = TaskRuns(told.put_nowait), Path(sys.argv[3]), TermFile()
    runs.begin(order_of(1, "wait", f"{folder}/ended"))
    pid = await pid_in(folder / "ended")
    runs.end(1)
    print("ended", await is_gone(pid), told.empty())
    term.write(now_s() + 3600)
    runs.begin(order_of(2, "wait", f"{folder}/over", term.path))
    pid = await pid_in(folder / "over")
    term.write(now_s())
    over = await told.get()
    print("over", await is_gone(pid), over.is_lost, over.why[:12])
    for number, size in enumerate((3, REPLY_BYTES_MAX + 1), 3):
        runs.begin(order_of(number, "talk", str(size)))
        ended = await told.get()
        print("talked", len(frames.task_replies.decode(ended.reply).answer) if ended.reply else ended.why)
    runs.begin(order_of(5, "wait", f"{folder}/nobody", term.path))
    print("late", (await told.get()).why[:12], (folder / "nobody").exists())
    await put(runs, told, folder)


def is_put_meanwhile(folder: Path, name: str) -> bool:
    """Whether a task puts an object while nothing of this process runs, for longer than its term."""
    time.sleep(TERM_S + 1.0)
    (folder / f"{name}.go").touch()
    while not (folder / f"{name}.begun").exists():
        time.sleep(0.02)
    time.sleep(1.0)
    return (folder / name).exists()


async def renew(owner: PrefixTerm) -> None:
    while True:
        owner.renew(now_s() + TERM_S)
        await asyncio.sleep(TERM_S / 10)


async def put(runs: TaskRuns, told: asyncio.Queue[TaskEnded], folder: Path) -> None:
    """A task whose driver is stopped for longer than its term, and whose prefix is then another database's."""
    owner = PrefixTerm(ENDLESS, 0.0)
    renewing = asyncio.create_task(renew(owner))
    (folder / "first.go").touch()
    runs.begin(order_of(6, "put", json.dumps([str(folder), ["first", "second", "third"]]), owner.path))
    await until(folder / "first")
    print("stopped", is_put_meanwhile(folder, "second"))
    owner.renew(now_s() + TERM_S)
    await until(folder / "second")
    renewing.cancel()
    owner.renew(0.0, "the prefix is another's")
    ended = await told.get()
    print("given up", ended.is_lost, ended.why)


asyncio.run(main())
