"""What a worker and a process that validates answers tell each other, in frames of msgpack."""

from __future__ import annotations

from msgspec import Struct

LOAD_FRAME, LOADED_FRAME, REFUSED_FRAME, CHECK_FRAME, CHECKED_FRAME = range(5)
ANSWER_S = 1.0  # one answer may take so long
SILENT_S = 3.0  # then the process is killed: it is in code that Python cannot stop
LOAD_S = 60.0  # to import the code
MEMORY_BYTES = 512 * 1024 * 1024  # beyond what the process has once the class is loaded
FLUSH_S = 0.05  # between two replies
PROBLEMS_MAX, PROBLEM_CHARS_MAX = 5, 300
REPLY_BYTES_MAX = 8 * 1024 * 1024


class LoadOrder(Struct, frozen=True):
    """The class to load: FILE.py:NAME, and the sha256 of the file; empty: as it is."""

    source: str
    code: str = ""


class Loaded(Struct, frozen=True):
    """A class is ready. `document`: its JSON Schema."""

    document: str
    has_validators: bool


class Refused(Struct, frozen=True):
    """A class cannot be used."""

    message: str


class Checked(Struct, frozen=True):
    """What is wrong with an answer; `is_final`: it was stopped, and another answer may be no better."""

    problems: list[str]
    is_final: bool = False
