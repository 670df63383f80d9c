"""Replies of engines that a dialect rewrites: a short one in place, a long one in a child process."""

from __future__ import annotations

from collections.abc import Callable

from batchmill.children.bounds import MIB, Bounds
from batchmill.server.operations import Call

INLINE_BYTES_MAX = 256 * 1024  # of a reply that is rewritten in place
BOUNDS = Bounds(cpu_s=10.0, wall_s=30.0, memory_bytes=1024 * MIB, answer_bytes=256 * MIB)

Progress = Callable[[float], None]
Rewrite = Callable[[bytes, Progress], bytes]


async def rewritten(call: Call, rewrite: Rewrite, order: bytes) -> bytes:
    """What `rewrite` makes of an order that holds the reply.

    Args: `rewrite`, a function at its module's own level, where a child finds it.

    Raises: what it raises; TooComplex at a bound, RateLimited.
    """
    if len(order) <= INLINE_BYTES_MAX or call.programs is None:
        return rewrite(order, _unseen)
    target = f"{rewrite.__module__}:{rewrite.__name__}"
    return await call.programs.run(target, order, who=call.caller.project, work="the engine's answer", bounds=BOUNDS)


def _unseen(share: float) -> None:
    """Nobody looks at how far it is."""
