"""The bounds of templates, and the messages between sealing and the processes that render them."""

from __future__ import annotations

from msgspec import Struct

from batchmill.types import PromptTemplate

MIB = 1024 * 1024
TEXT_BYTES_MAX = MIB  # of one row's prompt
RENDER_CPU_S = 0.05  # of one row
KILL_CPU_S = 0.1  # what no exception stops is killed then
COMPILE_CPU_S = 2.0
MEMORY_BYTES = 256 * MIB  # of all that a process holds beyond what it began with
STOPPED_MAX = 1_000  # rows that may take too long before the whole dataset is refused
KILLED_WEIGHT = 10  # a process that must be started again counts as so many
REPLY_S = 600.0  # a process that says nothing for so long has stopped

CHECK_FRAME, RENDER_FRAME, REFUSED_FRAME = range(3)


class CheckOrder(Struct, frozen=True):
    """The template to compile. `columns` None: it was checked already."""

    template: PromptTemplate
    columns: list[str] | None
    may_be_constant: bool
    line_bytes_max: int


class Refusal(Struct, frozen=True):
    """Why a template is refused."""

    code: str
    message: str


class Rendered(Struct, frozen=True):
    """The lines of a chunk with their prompts, as many as before."""

    data: bytes
    stopped: int  # rows that took too long
    sample: str = ""  # what was said of the first of them
