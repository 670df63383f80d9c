"""The process that compiles and renders a template of Jinja2, which may do what its author likes.

It holds nothing but rows: it opens no file, and its environment has no secrets. A row that takes too long is stopped by
an exception, or by the kernel, which ends the process. It reads frames from stdin and writes frames to stdout.
"""

from __future__ import annotations

import codecs
import json
import pprint  # noqa: F401
import resource
import signal
import textwrap  # noqa: F401
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jinja2.debug  # noqa: F401 - this, pprint and textwrap would be imported when no file can be opened any more
import msgspec
from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchmill.children.frames import FRAME, frame, read_exactly, run, write_all
from batchmill.datasets.templates.columns import check_columns
from batchmill.datasets.templates.messages import (
    CHECK_FRAME,
    COMPILE_CPU_S,
    KILL_CPU_S,
    MEMORY_BYTES,
    MIB,
    REFUSED_FRAME,
    RENDER_CPU_S,
    RENDER_FRAME,
    TEXT_BYTES_MAX,
    CheckOrder,
    Refusal,
    Rendered,
)
from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import text_of
from batchmill.wire.rows.rendered_rows import with_fault, with_prompt

SHOWN_CHARS = 300  # of an error of a template
TEMPLATE = "<template>"  # what Jinja2 calls the file of a template that came as text
OTHER_FILES = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
NOT_REPEATABLE = ("random",)  # filters; a row has the same prompt however often it is rendered

_decode = msgspec.json.Decoder().decode
DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class _Stopped(BaseException):
    """The time of a row is over. No handler of `Exception` holds it."""


class _TooLarge(Exception):
    """The text of a row is too long."""


class _Timer:
    """Raises `_Stopped` in the code under way after its processor time, and has the kernel end the process after more.

    The first needs Python's interpreter to run; a single operation, such as a power, may keep it from that.
    """

    def __init__(self) -> None:
        signal.signal(signal.SIGPROF, self._stop)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)

    def start(self, cpu_s: float, kill_cpu_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, kill_cpu_s)

    def disarm(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code in GUARDED:  # else the code was about to end, or has ended
                raise _Stopped
            frame = frame.f_back


def shown(value: Any) -> Any:
    """What `{{ value }}` writes: a text as it is, nothing for null, JSON for all else."""
    if isinstance(value, str) or value is None:
        return value or ""
    if isinstance(value, Undefined):
        return value
    if type(value) is int:
        return str(value)
    if isinstance(value, bool | float | list | tuple | dict):
        return text_of(msgspec.Raw(msgspec.json.encode(value)))
    raise TypeError(f"a {type(value).__name__} is no text: use |list, |join or |length")


def _as_json(value: Any, indent: int | None = None) -> str:
    """The filter `tojson`, without the escapes that HTML needs."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, finalize=shown, trim_blocks=True, lstrip_blocks=True,
        extensions=[LoopControlExtension], cache_size=0,
    )  # fmt: skip
    for name in NOT_REPEATABLE:
        del made.filters[name]
    del made.globals["lipsum"]
    made.filters["tojson"] = _as_json
    return made


class CompiledTemplate:
    """One template, ready to render rows."""

    def __init__(self, order: CheckOrder, timer: _Timer) -> None:
        """Raises: InvalidInput (`invalid_template`, `missing_column`, `constant_prompt`)."""
        self._name, self._timer, self._line_bytes_max = order.template.name, timer, order.line_bytes_max
        timer.start(COMPILE_CPU_S, COMPILE_CPU_S + KILL_CPU_S)
        try:
            self._template = self._compile(order)
        except TemplateSyntaxError as error:
            self._refuse(error.lineno, error.message or "it is no Jinja2")
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            self._refuse(None, f"it cannot be compiled ({_in_words(error)}): make it simpler")
        except _Stopped:
            self._refuse(None, f"it takes more than {COMPILE_CPU_S:g} s to compile: make it simpler")
        finally:
            timer.disarm()

    def _compile(self, order: CheckOrder) -> Template:
        environment = _environment()
        tree = environment.parse(order.template.text)
        self._refuse_other_files(tree)
        if order.columns is not None:
            check_columns(tree, order.template.name, order.columns, may_be_constant=order.may_be_constant)
        return environment.from_string(tree)

    def _refuse_other_files(self, tree: nodes.Template) -> None:
        for node in tree.find_all(OTHER_FILES):
            self._refuse(node.lineno, "a template cannot read others: put their text into this one")

    def _refuse(self, line: int | None, why: str) -> NoReturn:
        place = self._name if line is None else f"{self._name}, line {line}"
        raise InvalidInput(f"{place}: {why}", code="invalid_template")

    def render(self, lines: bytes) -> Rendered:
        """Render a chunk of whole lines."""
        rendered, stopped, sample = [], 0, ""
        for line in lines.split(b"\n"):
            row = line.strip()
            try:
                columns = _decode(row) if row else None
            except DECODE_ERRORS:
                columns = None  # validation says what is wrong with it
            if not isinstance(columns, dict):
                rendered.append(line)
                continue
            text, code = self._text(columns) if len(line) <= self._line_bytes_max else self._too_long()
            if code == "template_too_slow":
                stopped, sample = stopped + 1, sample or text
            rendered.append(with_fault(row, code, text) if code else with_prompt(row, text))
        self._timer.disarm()
        return Rendered(b"\n".join(rendered), stopped, sample)

    def _too_long(self) -> tuple[str, str]:
        return f"the line is longer than {self._line_bytes_max} bytes", "line_too_long"

    def _text(self, columns: dict[str, Any]) -> tuple[str, str]:
        """Returns: the prompt and "", or what is wrong and its code."""
        try:
            self._timer.start(RENDER_CPU_S, KILL_CPU_S)
            return self._prompt(columns), ""
        except _Stopped as error:
            place = self._place(error.__traceback__)
            return f"{place}: the row took more than {RENDER_CPU_S * 1000:g} ms", "template_too_slow"
        except _TooLarge:
            return f"{self._name}: the prompt is longer than {TEXT_BYTES_MAX // MIB} MiB", "template_too_large"
        except MemoryError as error:
            place = self._place(error.__traceback__)
            return f"{place}: the row took more than {MEMORY_BYTES // MIB} MiB of memory", "template_too_large"
        except Exception as error:
            return f"{self._place(error.__traceback__)}: {_in_words(error)}", "template_failed"

    def _prompt(self, columns: dict[str, Any]) -> str:
        context = self._template.new_context({"row": columns, **columns})
        parts, left = [], TEXT_BYTES_MAX
        for part in self._template.root_render_func(context):
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise _TooLarge
        text = "".join(parts)
        if not text.isascii() and len(text.encode()) > TEXT_BYTES_MAX:
            raise _TooLarge
        return text

    def _place(self, trace: TracebackType | None) -> str:
        """The template's name and the line that was under way."""
        line = None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == TEMPLATE:
                line = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return self._name if line is None else f"{self._name}, line {line}"


GUARDED = (CompiledTemplate._compile.__code__, CompiledTemplate._prompt.__code__)  # what runs code of a template


def _in_words(error: BaseException) -> str:
    text = str(error)[:SHOWN_CHARS]
    return text or type(error).__name__


def _confine() -> None:
    """Take from this process what rendering does not need: further files, memory, core dumps."""
    codecs.lookup("unicode_escape")  # reads literals; no module can be imported from here on
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    most = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _frames(fd: int) -> Iterator[tuple[int, bytes]]:
    while len(head := read_exactly(fd, FRAME.size)) == FRAME.size:
        size, kind = FRAME.unpack(head)
        payload = read_exactly(fd, size)
        if len(payload) < size:
            return
        yield kind, payload


def serve(orders: int, results: int, confine: Callable[[], None] = _confine) -> None:
    """Compile the template of the first frame and render the lines of every other one.

    Args: orders, results: file descriptors.
    """
    timer, template = _Timer(), None
    for kind, payload in _frames(orders):
        if kind == RENDER_FRAME and template is not None:
            reply = frame(RENDER_FRAME, template.render(payload))
        else:
            confine()
            try:
                template = CompiledTemplate(msgspec.msgpack.decode(payload, type=CheckOrder), timer)
                reply = frame(CHECK_FRAME, None)
            except InvalidInput as error:
                reply = frame(REFUSED_FRAME, Refusal(error.code, error.message))
        write_all(results, reply)


if __name__ == "__main__":
    run(serve)
