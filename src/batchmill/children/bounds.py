"""Limits of work in a child process, and the errors when it exceeds them."""

from __future__ import annotations

from msgspec import Struct

from batchmill.errors import TooComplex

MIB = 1024 * 1024


class ResourceLimits(Struct, frozen=True):
    """The limits of one piece of work, which is killed at the first that it reaches."""

    cpu_s: float = 2.0  # of processor time
    wall_s: float = 10.0  # from its beginning, however busy the machine is
    memory_bytes: int = 256 * MIB  # of data: what it holds, its order and its answer included
    answer_bytes: int = 64 * MIB


def took_too_long(work: str, seconds: float) -> TooComplex:
    return TooComplex(
        f"{work} took more than {seconds:g} s and was stopped: make it simpler, or what it works on smaller"
    )


def took_too_much(work: str, memory_bytes: int) -> TooComplex:
    return TooComplex(
        f"{work} took more than {memory_bytes // MIB} MiB of memory and was stopped: make it simpler, or what it works "
        "on smaller"
    )


def said_too_much(work: str, answer_bytes: int) -> TooComplex:
    return TooComplex(
        f"{work} came to more than {answer_bytes // MIB} MiB and was stopped: make it select less, or what it works on "
        "smaller"
    )
