"""The functions of `kill_functions.py`: they leave a line for each row that they are called with."""

from __future__ import annotations

import os
import time

import numpy as np

import batchmill

CALL_S = 0.001
_calls = os.open(os.environ["BENCHMARK_CALLS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _note(users: list[str]) -> None:
    now = time.time()
    os.write(_calls, "".join([f"{user} {now}\n" for user in users]).encode())


def counted(user: str, **fields: object) -> dict[str, object]:
    """Count the call, and take a millisecond."""
    _note([user])
    time.sleep(CALL_S)
    return {"user": user, "fields": sorted(fields)}


@batchmill.batched(64)
def counted_columns(user: list[str], x: np.ndarray) -> np.ndarray:
    """Count the calls, and take a millisecond for each row."""
    _note(user)
    time.sleep(CALL_S * len(user))
    return x * 2
