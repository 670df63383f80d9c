"""What a worker and a process that validates answers tell each other, as `function_runtime/answers.py` has it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from batchmill.function_runtime.answers import ANSWER_S, CHECK_FRAME, FRAME, LOAD_FRAME, PROBLEM_CHARS_MAX, PROBLEMS_MAX

SILENT_S = 3 * ANSWER_S  # then the process is killed: it is in code that Python cannot stop
LOAD_S = 60.0  # to import the code
REPLY_BYTES_MAX = 8 * 1024 * 1024
REFUSAL_CHARS_MAX = 16 * 1024  # of what its code says of a class that cannot be used


class LoadOrder(Struct, frozen=True):
    """The class to load, and its code.

    Args:
        source: FILE.py:NAME; in `folder`, if there is one.
        code: the sha256 of the file, with those that it imports from beside it; empty: as it is. Of a deployed
            version, that of all its code.
        folder: of a deployed version; empty: the file is used where it lies.
        python: the interpreter of a deployed version; None: batchmill's own.
    """

    source: str
    code: str = ""
    folder: str = ""
    python: str | None = None


class Loaded(Struct, frozen=True):
    """A class is ready. `document`: its JSON Schema. The user's code may have written both."""

    document: str
    has_validators: bool


class Refused(Struct, frozen=True):
    """A class cannot be used."""

    message: str


class Checked(Struct, frozen=True, array_like=True):
    """What is wrong with an answer; `is_final`: it was stopped, and another answer may be no better."""

    problems: list[str]
    is_final: bool = False


def load_frame(order: LoadOrder) -> bytes:
    payload = msgspec.json.encode({"source": order.source, "folder": order.folder})
    return FRAME.pack(len(payload), LOAD_FRAME) + payload


def check_frame(texts: Sequence[bytes]) -> bytes:
    head = struct.pack(f"<{len(texts) + 1}I", len(texts), *map(len, texts))
    return b"".join([FRAME.pack(len(head) + sum(map(len, texts)), CHECK_FRAME), head, *texts])


def read_checked(payload: bytes) -> list[Checked]:
    """As far as a worker heeds it. Raises: MsgspecError."""
    found = msgspec.json.decode(payload, type=list[Checked])
    return [
        Checked([text[:PROBLEM_CHARS_MAX] for text in each.problems[:PROBLEMS_MAX]], each.is_final) for each in found
    ]
