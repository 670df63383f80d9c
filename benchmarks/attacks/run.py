"""One attack in a process of its own: `run.py NAME`, what it needs to know as JSON on standard input.

Prints "begun" once it is under way, and on SIGTERM, or at its end, what it got back, as JSON. Loopback only; every
attack is bounded in connections, tries and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attacks import bodies, connections, engines, programs
from attacks.target import Tally, Target

TIME_MAX_S = 300.0
NICENESS = 10  # in life the attacker has a machine of its own
ATTACKS = {
    "slow_bodies": connections.slow_bodies,
    "slow_bodies_spread": connections.slow_bodies_spread,
    "slow_bodies_key": connections.slow_bodies_key,
    "slow_heads": connections.slow_heads,
    "no_body_held": bodies.no_body_held,
    "bodies_held": bodies.bodies_held,
    "grpc_messages": bodies.grpc_messages,
    "large_json": bodies.large_json,
    "filters": programs.filters,
    "searches": programs.searches,
    "poison_live": engines.poison_live,
    "poison_rows": engines.poison_rows,
    "engine_killed": engines.benign_rows,
}


async def attack(name: str, target: Target) -> None:
    """Until it is over, its time is, or somebody ends it."""
    tally, loop = Tally(), asyncio.get_running_loop()
    under_way = asyncio.ensure_future(ATTACKS[name](target, tally))
    loop.add_signal_handler(signal.SIGTERM, under_way.cancel)
    with contextlib.suppress(asyncio.CancelledError, TimeoutError):
        await asyncio.wait_for(under_way, TIME_MAX_S)
    print(json.dumps(tally.counts), flush=True)
    os._exit(0)  # threads of gRPC may still wait for replies


def main() -> None:
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(attack(sys.argv[1], Target(**json.loads(sys.stdin.readline()))))


if __name__ == "__main__":
    main()
