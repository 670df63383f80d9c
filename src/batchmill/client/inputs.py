"""Checks the arguments of the SDK before anything is sent, and writes local files."""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, TypedDict, TypeGuard, TypeVar, cast

import msgspec
from msgspec.structs import fields

from batchmill.client.bundling import bundled, frame_columns
from batchmill.client.schema_classes import has_code
from batchmill.errors import InvalidInput
from batchmill.states import JobState
from batchmill.types import JobView
from batchmill.wire import adapter_bundles
from batchmill.wire.choices import values_at
from batchmill.wire.input_urls import is_input_url
from batchmill.wire.native import (
    BackendInfo,
    FileInfo,
    Flaw,
    Format,
    Labels,
    MoreThanNothing,
    Name,
    NewAlias,
    OutputFormat,
    Priority,
    SampleRows,
    Seed,
    Work,
)
from batchmill.wire.native_models import Adapters, Args, Text, Token
from batchmill.wire.schemas.class_schemas import schema_of

W = TypeVar("W", bound=Work)
Upload: TypeAlias = str | os.PathLike[str] | BinaryIO
Source: TypeAlias = Upload | FileInfo

FILE_ID = "file-"
SPOOL_BYTES = 16 * 1024 * 1024  # of an archive that is kept in memory


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file. Raises: InvalidInput if it cannot be read."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise InvalidInput(f"{os.fspath(path)} cannot be read: {error.strerror}", code="unreadable_file") from None


def sources_of(inputs: Source | Iterable[Source]) -> list[Source]:
    """The files of a job. Raises: InvalidInput for rows in memory."""
    if _is_source(inputs):
        return [cast(Source, inputs)]
    _refuse_rows(inputs, may_be_many=True)
    sources = list(cast(Iterable[Source], inputs))
    for source in sources:
        _refuse_rows(source, may_be_many=False)
    return sources


def is_at_server(source: Source) -> TypeGuard[str]:
    """Whether the server reads `source` itself: the id of a file that it has, or a URL."""
    if not isinstance(source, str):
        return False
    return is_input_url(source) or (source.startswith(FILE_ID) and not os.path.exists(source))


def filename_of(source: Source) -> str | None:
    """The name of an open file; None: it has none, or `source` is a path."""
    if isinstance(source, str | os.PathLike):
        return None
    return os.path.basename(getattr(source, "name", "")) or None


def _is_source(source: object) -> bool:
    return isinstance(source, str | os.PathLike | FileInfo) or hasattr(source, "read")


def _refuse_rows(source: object, *, may_be_many: bool) -> None:
    """Raises: InvalidInput for rows in memory, and says what to do: a job takes files."""
    if _is_source(source):
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
        f"a {type(source).__name__} is not a file: {way}, and submit the path of that", code="invalid_source"
    )


def described(
    kind: type[W], files: list[str], options: Mapping[str, Any], *, may_have_code: bool = False,
    others: Collection[str] = (),
) -> W:  # fmt: skip
    """A job order with these fields; `model` is short for `models` with one name.

    Args:
        may_have_code: the class of the schema may validate in Python, and its code is deployed before it is sent.
        others: names that the caller may give too and has taken out, for the message about an unknown one.

    Raises: InvalidInput.
    """
    given = dict(options)
    if (model := given.pop("model", None)) is not None:
        if "models" in given:
            raise InvalidInput("model and models are two names of one thing: leave one out")
        if not isinstance(model, str):
            raise InvalidInput(f"model is one name, and models a list of them, not {type(model).__name__}")
        given["models"] = [model]
    if given.get("schema") is not None and given.get("validator") is not None:
        raise InvalidInput("the class of `validator` has a schema: leave one of both out", code="schema_conflict")
    is_deployed = has_code(given)
    assert may_have_code or not is_deployed, "a class with code is deployed, and its version is named"
    if given.pop("schema_requirements", None) is not None and not is_deployed:
        raise InvalidInput(
            "schema_requirements is for a schema whose class validates in Python: leave it out", code="needless_schema"
        )
    if (source := given.get("schema")) is not None:
        given["schema"] = schema_of(source)
    known = [each.name for each in fields(kind) if each.name != "files"]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *others, "model"], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*known, *others])}"
            raise InvalidInput(f"there is no field {name!r}; {hint}", code="unknown_field")
    try:
        return msgspec.convert({**given, "files": files}, kind)
    except msgspec.ValidationError as error:
        path = str(error).rpartition("`$.")[2].rstrip("`")
        known = values_at(kind, path) if str(error).startswith("Invalid enum value") else []
        hint = f"; known are {', '.join(known)}" if known else ""
        raise InvalidInput(f"{error}{hint}", code="invalid_field") from None


@contextlib.contextmanager
def function_bundle(source: Any, options: Mapping[str, Any]) -> Iterator[BinaryIO]:
    """The archive of a function with its code and settings. Raises: InvalidInput."""
    given = dict(options)
    include = given.pop("include", ())
    samples = {f"{name}.json": given.pop(f"{name}_json", None) for name in ("input", "output")}
    chosen = {name: Path(path).absolute() for name, path in samples.items() if path is not None}
    columns = frame_columns(given.pop("dataframe_mode", False), given.pop("example_dataframe", None))
    if columns:
        given["frame_columns"] = columns
    if (path := given.get("requirements")) is not None and os.path.isfile(path):
        given["requirements"] = Path(path).read_text()
    with bundled(source, given, include=include, samples=chosen) as (_, file):
        yield file


@contextlib.contextmanager
def adapter_bundle(folder: str) -> Iterator[BinaryIO]:
    """The archive of an adapter's folder, open at its beginning."""
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spooled:
        file = cast(BinaryIO, spooled)
        adapter_bundles.write(file, Path(folder))
        file.seek(0)
        yield file


def is_adapter_folder(source: str | os.PathLike[str], token: str | None) -> bool:
    """Whether an adapter is a local folder. Raises: InvalidInput for a missing folder."""
    text = os.fspath(source)
    is_folder = os.path.isdir(text)
    if is_folder and token is not None:
        raise InvalidInput("a folder of this machine needs no token: leave it out", code="needless_token")
    if not is_folder and (not isinstance(source, str) or text.startswith((".", "~"))):
        raise InvalidInput(f"there is no folder {text!r}", code="unknown_adapter")
    return is_folder


def alias_of(backends: dict[int, float] | list[BackendInfo], mirrors: Sequence[int | BackendInfo]) -> NewAlias:
    """The target of an alias; versions of the branch main may be given as numbers."""
    if isinstance(backends, dict):
        backends = [BackendInfo(number, weight=weight) for number, weight in backends.items()]
    return NewAlias(backends, [BackendInfo(each) if isinstance(each, int) else each for each in mirrors])


def size_of(file: BinaryIO) -> int:
    """The size of an open file in bytes; the position is its beginning again."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size_bytes


def is_past(until: float | None, now: float, view: JobView) -> bool:
    """Whether a deadline has passed."""
    state = JobState(view.state)
    return until is not None and now >= until and not state.is_at_rest and state is not JobState.PAUSED


@contextlib.contextmanager
def part_of(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A temporary file that gets its name once it is complete."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


AnyPath = str | os.PathLike[str]


class RowOptions(TypedDict, total=False):
    """What to compute for each row, apart from the models."""

    format: Format | None  # None: seen from the file's name and first row
    prompt: str | None  # of each row of a table, with {column} in it
    system: str | None
    template: str | None  # in the place of `prompt`: a template of Jinja2
    url: str | None  # the path that prompts go to
    params: dict[str, Any]  # further fields of each request that a prompt makes
    schema: dict[str, Any] | type | str | None  # a JSON Schema, or what `schemas.schema_of` makes one of
    validator: str | None  # in the place of `schema`: NAME or NAME@VERSION of a class that was deployed
    schema_attempts: int  # how often an answer that does not fit is asked for again
    field_prefix: str  # of the columns that the fields of the schema become
    image_columns: list[str]  # whose cells, https:// or data: URLs or bytes of Parquet, go with the prompt
    audio_columns: list[str]
    document_columns: list[str]
    model_column: str | None  # names the model of each row of a table; an empty cell: the first
    adapter_column: str | None  # names the adapter of each row; an empty cell: none
    allow_constant_prompt: bool  # a prompt may name no column: every row makes the same request
    on_invalid: Literal["fail", "skip"]  # with bad rows: run none, or give them error results
    dedupe: bool  # run identical requests once even where their answers may vary
    reuse: bool | None  # take over results of earlier jobs with the same requests; None: as the project says
    limit: SampleRows | None  # only the first rows: then the job pauses (`sampled`), until it is resumed
    sample: SampleRows | None  # the same with so many rows that are drawn at random
    seed: Seed | None  # of the sample; None: 0
    deadline: MoreThanNothing | None  # seconds since the epoch, UTC


class WorkOptions(RowOptions, total=False):
    """What to compute for each row: the fields of `wire.native.Work`."""

    model: Name  # short for `models` with one name
    models: list[Name]  # the first is for rows that name none; empty: all
    schema_requirements: str | None  # of a class whose validators are Python: a requirements file or its text


class HowOptions(TypedDict, total=False):
    """How a job runs, apart from what it computes."""

    budget: MoreThanNothing | None  # USD; the job pauses when so much is spent
    priority: Priority  # jobs of a higher one go first
    completion_s: float | None  # the deadline, in seconds from now
    fail_on: list[Flaw]  # replies of language models that are errors of their rows
    labels: Labels
    output_format: OutputFormat | None  # None: jsonl, or as the name of `output` says
    output: str | None  # the URL of an object or folder that the server writes; None: results stay at the server
    part_rows: int | None  # of each part, if `output` is a folder
    overwrite: bool  # results that another job wrote to `output` may be replaced
    together: bool  # failed OpenAI rows are among the others, in the order of the input


class JobOptions(WorkOptions, HowOptions, total=False):
    """The keywords of a job: the fields of `wire.native.NewJob`."""


class DeployOptions(TypedDict, total=False):
    """How a function is deployed: the fields of `wire.deploys.DeployOrder` that its code does not say."""

    name: str
    branch: str
    requirements: str | None  # a file or its text; None: no environment of its own
    python: str | None  # an interpreter's path, or "3.11"; None: the server's own
    environment: dict[str, str]
    secrets: dict[str, str]  # variable -> "env:NAME", "file:PATH" or "secret:NAME", at the server
    workers: int
    gpus: int
    memory_bytes: int | None
    timeout_s: float | None
    batch_size: int
    batch_window_s: float | None  # the longest wait for a batch to fill; 0: none; None: 10 ms
    frame_columns: list[str]
    is_idempotent: bool
    is_deterministic: bool  # equal rows have equal results: projects may reuse them
    received_shapes: bool
    examples: list[Any]  # arguments by name (an object) or by position (a list): each is called before it counts
    is_shared: bool | None  # other projects may call it
    kind: Literal["model", "schema"]  # schema: a class that validates answers of jobs
    include: Sequence[str]  # further files and folders, globs too
    input_json: AnyPath | None
    output_json: AnyPath | None
    dataframe_mode: bool
    example_dataframe: Any  # a data frame or its columns


class _LlmSettings(TypedDict, total=False):
    engine_args: Args
    hf_token: Token | None  # shown to the model hub; kept encrypted
    replicas_min: int | None
    replicas_max: int | None
    cooldown_s: float | None  # an idle replica ends after so long
    scale_up_requests: int | None  # another one starts above so many requests a replica
    memory_bytes: int | None  # what one replica takes of the machine
    gpus: int | None
    takes_adapters: bool
    preloaded_adapters: Adapters
    description: Text | None


class LlmOptions(_LlmSettings, total=False):
    """How a language model is served: the fields of `wire.native_llms.NewLlm`."""


class LlmChanges(_LlmSettings, total=False):
    """What changes of a deployed language model: the fields of `wire.native_llms.LlmChange`."""

    base_model: Name


def refuse_elsewhere(name: str) -> None:
    """Refuse an input that the server has no copy of. Raises: InvalidInput."""
    if is_input_url(name):
        raise InvalidInput(f"the input is at {name}, where the server read it: read it there", code="no_copy_here")


def refuse_unreadable(name: str) -> None:
    """Refuse an input that the SDK cannot read as lines: one elsewhere, or a compressed one. Raises: InvalidInput."""
    refuse_elsewhere(name)
    if name.endswith((".gz", ".zst")):
        raise InvalidInput(f"the input {name} is compressed: read it with read_file", code="compressed_input")
