"""What takes more than one request: trying again where that is safe, uploading what is to be run, turning pages.

Each is a generator that yields steps and is sent what became of them; the shells do nothing but take the steps.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec
from msgspec.structs import fields

from batchmill.client import calls
from batchmill.client.bundling import bundled, frame_columns
from batchmill.client.messages import Ask, Broken, Reply, Send, SendFile, Sleep, Steps
from batchmill.client.replies import error_of, retry_after_s, value_of
from batchmill.errors import BatchmillError, InvalidInput, Unavailable
from batchmill.wire.native import Accepted, DeployReply, FileInfo, NewJob, Work

T = TypeVar("T")
W = TypeVar("W", bound=Work)
Source = str | os.PathLike[str] | FileInfo | BinaryIO

ATTEMPTS_MAX = 5
FIRST_WAIT_S, WAIT_S_MAX = 0.5, 20.0
FILE_ID = "file-"
UNSEEN = (429,)  # the server refused before it did anything
PASSING = (429, 502, 503, 504)


def waited_s(attempt: int, told_s: float | None) -> float:
    """How long to wait after the attempt with this number, counted from 0. Not pseudo-random to be unguessable."""
    own = min(FIRST_WAIT_S * 2**attempt, WAIT_S_MAX)
    return max(told_s or 0.0, own * (0.5 + random.random() / 2))


def ask(what: Ask[T]) -> Steps[T]:
    """Ask until there is an answer, as long as asking again cannot do anything twice."""
    request = what.request
    for attempt in range(ATTEMPTS_MAX):
        is_last = attempt + 1 == ATTEMPTS_MAX
        try:
            reply: Reply = yield Send(request)
        except Broken as broken:
            if is_last or (broken.was_sent and not request.is_repeatable):
                raise unreachable(broken) from None
            yield Sleep(waited_s(attempt, None))
            continue
        if is_last or not is_passing(reply) or (reply.status not in UNSEEN and not request.is_repeatable):
            return value_of(what, reply)
        yield Sleep(waited_s(attempt, retry_after_s(reply.headers)))
    raise AssertionError("the last attempt returns or raises")


def is_passing(reply: Reply) -> bool:
    """It may go better in a moment. 502 and 504 are not ours, but of something in between: they say nothing of it."""
    if reply.status not in PASSING:
        return False
    return reply.status in (502, 504) or error_of(reply.status, reply.headers, reply.body).retryable


def unreachable(broken: Broken) -> Unavailable:
    return Unavailable(str(broken), code="unreachable")


# -- files --------------------------------------------------------------------------------------------------------


def upload(
    source: str | os.PathLike[str] | BinaryIO, *, filename: str | None, expires_s: float | None
) -> Steps[FileInfo]:
    """Send a file. It is not sent again when the connection breaks: a file object cannot be read twice."""
    if isinstance(source, str | os.PathLike):
        with _opened(source) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            return (yield from _send_file(file, filename or Path(source).name, expires_s, size_bytes))
    if filename is None:
        raise InvalidInput("a file object has no name: say filename=, its end tells what it holds")
    return (yield from _send_file(source, filename, expires_s, None))


def _send_file(file: BinaryIO, filename: str, expires_s: float | None, size_bytes: int | None) -> Steps[FileInfo]:
    what = calls.upload(filename, expires_s=expires_s, size_bytes=size_bytes)
    try:
        reply: Reply = yield SendFile(what.request, file)
    except Broken as broken:
        raise unreachable(broken) from None
    return value_of(what, reply)


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InvalidInput(f"{os.fspath(path)} cannot be read: {error.strerror}", code="unreadable_file") from None


def _uploaded(inputs: Source | Iterable[Source], fresh: list[str]) -> Steps[list[str]]:
    """The ids of all inputs; what is not at the server yet is sent there, and its id added to `fresh`."""
    sources: Sequence[Source]
    if isinstance(inputs, str | os.PathLike | FileInfo) or hasattr(inputs, "read"):
        sources = [inputs]  # type: ignore[list-item]
    else:
        _refuse_rows(inputs, may_be_many=True)
        sources = list(inputs)  # type: ignore[arg-type]
    ids = []
    for source in sources:
        if isinstance(source, FileInfo):
            ids.append(source.id)
        elif isinstance(source, str) and source.startswith(FILE_ID) and not os.path.exists(source):
            ids.append(source)
        else:
            _refuse_rows(source, may_be_many=False)
            name = (
                None if isinstance(source, str | os.PathLike) else os.path.basename(getattr(source, "name", "")) or None
            )
            info = yield from upload(source, filename=name, expires_s=None)
            fresh.append(info.id)
            ids.append(info.id)
    return ids


def discard(file_ids: list[str]) -> Steps[None]:
    """Leave nothing behind of what failed; why it failed is what the caller hears."""
    for file_id in file_ids:
        with contextlib.suppress(BatchmillError):
            yield from ask(calls.delete_file(file_id))


# -- work ---------------------------------------------------------------------------------------------------------


def _refuse_rows(source: object, *, may_be_many: bool) -> None:
    """Raises: InvalidInput for rows that lie in memory, with what to do: a job is of files."""
    if isinstance(source, str | os.PathLike | FileInfo) or hasattr(source, "read"):
        return
    if hasattr(source, "write_parquet"):
        way = "call its write_parquet('rows.parquet')"
    elif hasattr(source, "to_parquet"):
        way = "call its to_parquet('rows.parquet')"
    elif may_be_many and isinstance(source, Iterable) and not isinstance(source, dict | bytes | bytearray):
        return
    else:
        way = "write the rows to a file, such as rows.jsonl with a JSON object a line"
    raise InvalidInput(
        f"a {type(source).__name__} is no file: {way}, and submit the path of that", code="invalid_source"
    )


def submit(inputs: Source | Iterable[Source], options: dict[str, Any]) -> Steps[Accepted]:
    """Upload what is to be run and make it a job; a repeat that the network makes necessary is the same job."""
    described(NewJob, ["checked before anything is sent"], options)
    fresh: list[str] = []
    try:
        job = described(NewJob, (yield from _uploaded(inputs, fresh)), options)
        return (yield from ask(calls.submit(job, secrets.token_hex(16))))
    except BatchmillError as error:
        # Whether it was taken is not known where no reply came: then its files may be a job's already.
        if error.code != "unreachable":
            yield from discard(fresh)
        raise


def preview(call: Callable[[Work], Ask[T]], inputs: Source | Iterable[Source], options: dict[str, Any]) -> Steps[T]:
    """Look at a dataset; what was uploaded for it is removed again."""
    described(Work, ["checked before anything is sent"], options)
    fresh: list[str] = []
    try:
        work = described(Work, (yield from _uploaded(inputs, fresh)), options)
        found = yield from ask(call(work))
    except BatchmillError:
        yield from discard(fresh)
        raise
    yield from discard(fresh)
    return found


def described(kind: type[W], files: list[str], options: dict[str, Any]) -> W:
    """The order with these fields; `model` is short for `models` with one name. Raises: InvalidInput."""
    told = dict(options)
    if (model := told.pop("model", None)) is not None:
        if "models" in told:
            raise InvalidInput("model and models are two names of one thing: leave one out")
        told["models"] = [model]
    known = [each.name for each in fields(kind) if each.name != "files"]
    for name in told:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "model"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InvalidInput(f"there is no field {name!r}; {hint}", code="unknown_field")
    try:
        return msgspec.convert({**told, "files": files}, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error), code="invalid_field") from None


def deploy(source: Any, settings: dict[str, Any]) -> Steps[DeployReply]:
    """Send a function with its code. What was not answered is not sent again: it may be a version already."""
    told = dict(settings)
    include = told.pop("include", ())
    samples = {f"{name}.json": told.pop(f"{name}_json", None) for name in ("input", "output")}
    chosen = {name: Path(path).absolute() for name, path in samples.items() if path is not None}
    columns = frame_columns(told.pop("dataframe_mode", False), told.pop("example_dataframe", None))
    if columns:
        told["frame_columns"] = columns
    if (path := told.get("requirements")) is not None and os.path.isfile(path):
        told["requirements"] = Path(path).read_text()
    with bundled(source, told, include=include, samples=chosen) as (_, file):
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        return (yield from send_bundle(file, size_bytes))


def send_bundle(file: BinaryIO, size_bytes: int) -> Steps[DeployReply]:
    """Send an archive of code."""
    what = calls.deploy(size_bytes)
    try:
        reply: Reply = yield SendFile(what.request, file)
    except Broken as broken:
        raise unreachable(broken) from None
    return value_of(what, reply)


# -- pages --------------------------------------------------------------------------------------------------------


class Pages(Generic[T]):
    """A listing page by page: take the steps of `next` until there are none."""

    def __init__(self, ask_for: Callable[[str | None], Ask[Any]], items: Callable[[Any], list[T]]) -> None:
        self._ask_for, self._items = ask_for, items
        self._after: str | None = None
        self.is_over = False

    def next(self) -> Steps[list[T]]:
        page = yield from ask(self._ask_for(self._after))
        self._after = page.after
        self.is_over = page.after is None
        return self._items(page)
