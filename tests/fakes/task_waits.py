"""Tasks that wait for a node, with the nodes that this program names: `python task_waits.py`. It needs no cluster.

Prints what the owner would get, one line each.
"""

import asyncio

from batchmill.executors.ray import task_runs
from batchmill.executors.ray.frames import RunTask, TaskEnded

LIMIT_S = 30.0
TASKS = 8


async def ends(nodes: dict[str, int], count: int = 1) -> tuple[list[TaskEnded], int]:
    """The ends of so many tasks, and how often the driver has looked at the nodes."""
    looks = 0

    def look() -> dict[str, int]:
        nonlocal looks
        looks += 1
        return nodes

    task_runs._look = look
    told: asyncio.Queue[TaskEnded] = asyncio.Queue()
    runs = task_runs.TaskRuns(told.put_nowait)
    for number in range(count):
        runs.begin(RunTask(number, b"", ""))
    async with asyncio.timeout(LIMIT_S):
        return [await told.get() for _ in range(count)], looks


async def after_a_failed_look() -> list[TaskEnded]:
    """The ends of two tasks, one after the other."""
    results = iter([ConnectionError("the head does not reply"), {"node": 1}])

    def look() -> dict[str, int]:
        if isinstance(result := next(results), Exception):
            raise result
        return result

    task_runs._look = look
    told: asyncio.Queue[TaskEnded] = asyncio.Queue()
    runs, ended = task_runs.TaskRuns(told.put_nowait), []
    for number in range(2):
        runs.begin(RunTask(number, b"", ""))
        async with asyncio.timeout(LIMIT_S):
            ended.append(await told.get())
    return ended


async def replies(*_: object) -> bytes:
    return b"done"


async def main() -> None:
    task_runs.TaskRuns._run_on = replies
    task_runs.LOOK_S = 3600.0
    done, looks = await ends({"node": TASKS}, TASKS)
    print("shared", {each.reply for each in done}, looks)
    failed, again = await after_a_failed_look()
    print("failed", failed.is_lost, failed.why, again.reply)
    task_runs.LOOK_S, task_runs.NODES_S = 0.01, 0.0
    ((gone,), _) = await ends({})
    print("gone", gone.is_lost, gone.why)
    task_runs.TASK_S = 0.0
    ((full,), _) = await ends({"node": 0})
    print("full", full.is_lost, full.why)


asyncio.run(main())
