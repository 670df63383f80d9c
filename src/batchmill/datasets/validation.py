"""The rules for one line: OpenAI batch rows, and rows of a table. They know bytes, but not files or line numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Raw, Struct

from batchmill.datasets import bodies
from batchmill.datasets.orders import SealOrder
from batchmill.datasets.request_digests import digests_of
from batchmill.errors import InvalidRow
from batchmill.types import Request, Row, RowError
from batchmill.wire.json_bytes import has_odd_numbers, split_object, text_of
from batchmill.wire.rows.forms import RowLine, TableForm
from batchmill.wire.rows.rendered_rows import MEDIA, PROMPT, fault_of
from batchmill.wire.schemas.output_schema import columns_of

ADAPTERS_MAX = 10_000  # that may be fetched for the rows of one dataset
ID_CHARS_MAX = 190  # with its version it becomes the name of an adapter
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(f"{_PART}/{_PART}")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a model hub id: OWNER/NAME."""
    return len(name) <= ID_CHARS_MAX and _HUB_ID.fullmatch(name) is not None


class HubPatterns:
    """Finds the base model of an adapter by patterns for adapter ids; the first pattern that matches wins."""

    def __init__(self, patterns: Iterable[tuple[str, int, int]]) -> None:
        """Args: patterns: (pattern, number of the model, number of its target), as in SealOrder."""
        self._patterns = [(re.compile(translate(text)), (model, target)) for text, model, target in patterns]

    def base_of(self, name: str) -> tuple[int, int] | None:
        """The model and the target of the base for an adapter id; None: the adapter may not be fetched."""
        if self._patterns and is_hub_id(name):
            for pattern, base in self._patterns:
                if pattern.fullmatch(name):
                    return base
        return None


class NamedAdapters:
    """Collects the adapters that rows name, up to one more than ADAPTERS_MAX: such a dataset is refused."""

    def __init__(self, patterns: Sequence[tuple[str, int, int]]) -> None:
        self._patterns = HubPatterns(patterns)
        self._bases: dict[str, tuple[int, int]] = {}
        self._new: list[str] = []

    def base_of(self, name: str) -> tuple[int, int] | None:
        """As `HubPatterns.base_of`; also collects the name."""
        known_base = self._bases.get(name)
        if known_base is not None:
            return known_base
        base = self._patterns.base_of(name)
        if base is not None and len(self._bases) <= ADAPTERS_MAX:
            self._bases[name] = base
            self._new.append(name)
        return base

    def new(self) -> list[str]:
        """The names collected since the last call."""
        names, self._new = self._new, []
        return names


CUSTOM_ID_CHARS_MAX = 512
URL_CHARS_MAX = 2048
SHOWN_CHARS = 80  # of an offending value, in a message
NAMES_SHOWN = 20
UNKNOWN_MODEL = "unknown_model"  # the code of a row that names none of the job

# The setting that adds paths to a model.
_PATHS_HINT = "; models.NAME.paths in the configuration adds others"

DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class CheckedLine(Struct, gc=False):
    """The result of checking a line. `error` is None for a row that may run."""

    custom_id: str | None = None
    error: RowError | None = None
    request: Request | None = None  # None for a table's row, which is not a request by itself
    model: int = 0
    target: int = 0


class Bulk(Struct, gc=False):
    """Lines that are all valid rows."""

    ids: list[str]  # their custom_ids; empty for tables
    # For each row, if the order has `keys`:
    targets: list[int] = []  # number of model and adapter together
    sizes: list[int] = []  # of its body, in bytes
    requests: bytes = b""  # digests of the requests, if the order asks for them


class Rules(Protocol):
    has_ids: bool  # each row must have a unique custom_id

    def bulk(self, lines: list[bytes]) -> Bulk | None:
        """Check lines together. None: some line may be invalid, check each one."""

    def check(self, line: bytes) -> CheckedLine:
        """Check one line, which is not blank and has no flaw as text."""

    def new_names(self) -> list[str]:
        """New columns since the last call, if the order limits their number."""

    def new_adapters(self) -> list[str]:
        """New adapters to fetch since the last call."""


class _Object(Struct, gc=False):
    """Any JSON object: its members are checked to be JSON, but not decoded."""


class _Envelope(Struct, forbid_unknown_fields=True, gc=False):
    custom_id: Annotated[str, Meta(min_length=1, max_length=CUSTOM_ID_CHARS_MAX)]
    url: str
    body: _Object
    method: Literal["POST"] = "POST"


class _Named(Struct, forbid_unknown_fields=True, gc=False):
    """An _Envelope that keeps the body to read its model."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=CUSTOM_ID_CHARS_MAX)]
    url: str
    body: Raw
    method: Literal["POST"] = "POST"


class _Id(Struct, gc=False):
    custom_id: str


class _Model(Struct, gc=False):
    model: str | None = None


_envelope = msgspec.json.Decoder(_Envelope).decode
_named = msgspec.json.Decoder(_Named).decode
_row = msgspec.json.Decoder(RowLine).decode
_id = msgspec.json.Decoder(_Id).decode
_model = msgspec.json.Decoder(_Model).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_any = msgspec.json.Decoder().decode
_FIELDS = tuple(RowLine.__struct_fields__)


def id_of(line: bytes) -> str | None:
    """The custom_id of a line, valid or not; None if it has none that can be read."""
    try:
        return _id(line).custom_id
    except DECODE_ERRORS:
        return None


class OpenAIRules:
    """Rows of the OpenAI Batch API."""

    has_ids = True

    def __init__(self, order: SealOrder) -> None:
        self._targets, self._bases = order.targets, frozenset(order.bases)
        self._default = order.default
        self._urls = order.urls
        self._services = order.services
        self._any_path_models = order.any_path_models
        self._features = [None if each is None else frozenset(each) for each in order.features]
        self._any_model = order.any_model
        self._adapters = NamedAdapters(order.patterns)
        self._patterns = [pattern for pattern, *_ in order.patterns]
        self._endpoint = order.endpoint
        self._has_digests = order.requests
        # A single function accepts any body, so its rows need no check of the body or the model. While the models of
        # rows are unknown, every row is checked.
        is_known = not order.any_model
        self._envelope_only = is_known and order.urls == [None] and not order.keys and order.default is not None
        # With several models, the rows of functions name theirs. Rows that may be folded are checked one by one.
        self._some_functions = is_known and None in order.urls and order.fold != "all"

    def bulk(self, lines: list[bytes]) -> Bulk | None:
        if not (self._envelope_only or self._some_functions):
            return None
        try:
            rows = list(map(_envelope if self._envelope_only else _named, lines))
            bulk = Bulk([row.custom_id for row in rows])
            if not self._envelope_only and not self._assign_targets(bulk, [row.body for row in rows]):
                return None
            if self._has_digests:
                bulk.requests = digests_of([row.url for row in rows], [row.body for row in rows])
        except DECODE_ERRORS:
            return None
        urls = {row.url for row in rows}
        if "\0" in "".join(bulk.ids) or not all(map(_is_path, urls)):
            return None
        return bulk if self._endpoint is None or urls == {self._endpoint} else None

    def _assign_targets(self, bulk: Bulk, bodies: list[Raw]) -> bool:
        """Set the targets and sizes of the rows if each is for a function; otherwise return False."""
        names = [body.model for body in map(_model, bodies)]
        routes = {name: self._targets.get(name) if name else self._default for name in set(names)}
        for route in routes.values():
            if route is None or self._urls[route[0]] is not None:
                return False
        bulk.targets = [routes[name][1] for name in names]
        bulk.sizes = list(map(len, map(memoryview, bodies)))
        return True

    def check(self, line: bytes) -> CheckedLine:
        try:
            row = _row(line)
        except DECODE_ERRORS as error:
            return _refusal(line, _explain(line, error))
        try:
            return self._check_row(row)
        except InvalidRow as error:
            return _refusal(line, error)

    def _check_row(self, row: RowLine) -> CheckedLine:
        _check_id(row.custom_id)
        if row.method != "POST":
            raise InvalidRow(f"method is {quoted(row.method)}; only POST can be run", code="invalid_method")
        if not _is_path(row.url):
            raise InvalidRow(
                f"url is {quoted(row.url)}; it must be a path like /v1/chat/completions", code="invalid_url"
            )
        if self._endpoint is not None and row.url != self._endpoint:
            raise InvalidRow(
                f"url is {quoted(row.url)}; it must be the endpoint of the batch, {self._endpoint!r}",
                code="invalid_url",
            )
        body = row.body
        if bytes(memoryview(body)[:1]) != b"{":
            raise InvalidRow(f"body is {_kind(body)}; it must be an object", code="invalid_body")
        model, target = self.route(row.url, body)
        return CheckedLine(row.custom_id, None, Request(row.url, bytes(body), row.custom_id), model, target)

    def new_names(self) -> list[str]:
        return []

    def new_adapters(self) -> list[str]:
        return self._adapters.new()

    def route(self, url: str, body: Raw) -> tuple[int, int]:
        """The model and the target of a body. Raises: InvalidRow if the model does not accept it."""
        if self._urls == [None] and self._default is not None:
            return self._default
        model, target = self.resolve(_model_of(body))
        allowed = self._urls[model]
        if allowed is None:
            return model, target
        if url not in allowed and not (model in self._any_path_models and url.startswith("/v1/")):
            raise InvalidRow(
                f"url is {quoted(url)}; this model takes {', '.join(sorted(allowed))}{_PATHS_HINT}", code="invalid_url"
            )
        features = self._features[model] if self._features else None
        bodies.check(url, body, is_ours=model not in self._services, features=features)
        return model, target

    def resolve(self, name: str | None) -> tuple[int, int]:
        if not name:
            if self._default is None:
                raise InvalidRow(f"body.model is missing; this job has {self.names}", code="missing_model")
            return self._default
        route = self._targets.get(name) or self._adapters.base_of(name)
        if route is None and self._any_model:
            return self._default
        if route is None:
            raise InvalidRow(f"body.model is {quoted(name)}; this job has {self.names}", code=UNKNOWN_MODEL)
        return route

    def is_adapter(self, name: str) -> bool:
        """Whether a name that `resolve` knows is an adapter's."""
        target = self._targets.get(name)
        return target is None or target[1] not in self._bases

    @cached_property
    def names(self) -> str:
        """The models and adapters that rows may name."""
        return self._shown(sorted(self._targets))

    @cached_property
    def adapter_names(self) -> str:
        """The adapters that rows may name."""
        names = sorted(filter(self.is_adapter, self._targets))
        return self._shown(names) if names or self._patterns else "no adapters"

    def _shown(self, names: list[str]) -> str:
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        patterns = f", and adapters like {', '.join(self._patterns[:NAMES_SHOWN])}" if self._patterns else ""
        return ", ".join(names[:NAMES_SHOWN]) + more + patterns


class TableRules:
    """Rows of a table: any JSON object with the columns that the prompt needs."""

    has_ids = False

    def __init__(self, order: SealOrder, form: TableForm) -> None:
        self._form = form
        self._order = order
        self._resolver = OpenAIRules(order)
        self._shapes: dict[tuple[str, ...], InvalidRow | None] = {}  # column names -> their flaw, if any
        self._names_max = -1 if order.columns_max is None else order.columns_max
        self._names: set[str] = set()
        self._new_names: list[str] = []

    def bulk(self, lines: list[bytes]) -> Bulk | None:
        if self._order.keys or self._form.has_additions:  # faults are members of rows
            return None
        try:
            rows = list(map(_members, lines))
        except DECODE_ERRORS:
            return None
        text = b"".join(lines)
        if text.count(b'":') != sum(map(len, rows)) or has_odd_numbers(text):  # duplicate names or nested objects
            return None
        shapes = set(map(tuple, rows))
        return Bulk([]) if all(self._flaw(shape) is None for shape in shapes) else None

    def check(self, line: bytes) -> CheckedLine:
        try:
            members = _members(line)
        except DECODE_ERRORS as error:
            return CheckedLine(error=_row_error(_not_object(line, error)))
        if self._form.has_additions and (fault := _without_additions(members, self._form)) is not None:
            return CheckedLine(error=fault)
        names = tuple(members)
        flaw = self._flaw(names)
        if flaw is not None:
            return CheckedLine(error=_row_error(flaw))
        if not self._form.makes_requests or not self._order.keys:
            return CheckedLine(model=self._order.default[0], target=self._order.default[1])
        request = self._form.request(Row(0, 0, line, self._form))
        if self._form.model_column is None and self._form.adapter_column is None:
            model, target = self._resolver.resolve(_model_of(request.body))  # `check_form` has checked the rest
            return CheckedLine(None, None, request, model, target)
        try:
            model, target = self._resolver.route(request.url, Raw(request.body))
            self._check_adapter(line, model)
        except InvalidRow as error:
            return CheckedLine(error=_row_error(self._in_column(line, error)))
        return CheckedLine(None, None, request, model, target)

    def _in_column(self, line: bytes, error: InvalidRow) -> InvalidRow:
        """The error of a row whose model or adapter a column names: it says which one."""
        if error.code != UNKNOWN_MODEL:
            return error
        members = split_object(line)
        for column in self._form.target_columns():
            cell = text_of(members[column])
            try:
                self._resolver.resolve(cell)
            except InvalidRow:
                known = self._resolver.names
                if column == self._form.adapter_column:
                    known = self._resolver.adapter_names
                return InvalidRow(
                    f"the column {quoted(column)} names {quoted(cell)}; this job has {known}", code=UNKNOWN_MODEL
                )
        return error

    def _check_adapter(self, line: bytes, model: int) -> None:
        """Raises: InvalidRow for an adapter of `model` in a row that names another model; for one that is a model."""
        cells = {name: text_of(value) for name, value in split_object(line).items()}
        column = self._form.adapter_column
        if column is not None and cells[column] and not self._resolver.is_adapter(cells[column]):
            raise InvalidRow(
                f"the column {quoted(column)} names {quoted(cells[column])}, which is a model and no adapter; this job "
                f"has {self._resolver.adapter_names}",
                code="wrong_adapter",
            )
        match self._form.target_names(cells):
            case [adapter, base] if self._resolver.resolve(base)[0] != model:
                raise InvalidRow(
                    f"{quoted(adapter)} is no adapter of {quoted(base)}, which the row names as its model",
                    code="wrong_adapter",
                )

    def _flaw(self, names: tuple[str, ...]) -> InvalidRow | None:
        if names not in self._shapes:
            if len(self._shapes) >= 1024:  # rows with ever new shapes must not fill the memory
                self._shapes.clear()
            self._collect(names)
            self._shapes[names] = column_flaw(names, self._form)
        return self._shapes[names]

    def _collect(self, names: tuple[str, ...]) -> None:
        if len(self._names) <= self._names_max:  # with more the dataset is refused: further names do not matter
            new_names = [name for name in names if name not in self._names]
            self._names.update(new_names)
            self._new_names += new_names

    def new_names(self) -> list[str]:
        names, self._new_names = self._new_names, []
        return names

    def new_adapters(self) -> list[str]:
        return self._resolver.new_adapters()


def rules_for(order: SealOrder) -> Rules:
    if isinstance(order.form, TableForm):
        return TableRules(order, order.form)
    return OpenAIRules(order)


def column_flaw(names: tuple[str, ...], form: TableForm) -> InvalidRow | None:
    """The flaw of a table with these columns; None: it has none."""
    for name in form.reserved:
        if name in names:
            is_field = form.schema is not None and name in columns_of(form.schema)
            way_out = "give the fields a --field-prefix, or rename it" if is_field else "rename it"
            text = f"a column is named {name!r}, which the results use: {way_out}"
            return InvalidRow(text, code="column_conflict")
    return missing_column(names, form)


def constant_prompt(names: tuple[str, ...], form: TableForm) -> InvalidRow | None:
    """The error for a prompt that makes the same request of every row; None: it does not, or it may."""
    if form.prompt is None or form.may_be_constant or form.media or form.template_columns():
        return None
    named = next((name for name in names if name and name in form.prompt), names[0] if names else "column")
    return InvalidRow(
        f"the prompt {quoted(form.prompt)} names no column, so every row would make the same request; the columns are "
        f"{', '.join(names[:NAMES_SHOWN]) or 'none'}: write {{{named}}} where a cell belongs, or allow it "
        "with --allow-constant-prompt (allow_constant_prompt)",
        code="constant_prompt",
    )


def missing_column(names: tuple[str, ...], form: TableForm) -> InvalidRow | None:
    """The error for the first column that the prompt needs and `names` lacks; None: none is missing."""
    for name in form.columns():
        if name not in names:
            shown = ", ".join(names[:NAMES_SHOWN]) or "none"
            needed_by = "the prompt" if name in form.template_columns() else "the choice of a model"
            needed_by = "a part of the message" if name in [each.column for each in form.media] else needed_by
            return InvalidRow(
                f"{needed_by} needs a column {quoted(name)}; the columns are {shown}{_nearest(name, names)}",
                code="missing_column",
            )
    return None


def check_form(order: SealOrder) -> None:
    """Check once that the requests rendered from a table are valid for its model.

    Raises: InvalidRow with the code that every row would have.
    """
    form = order.form
    if not isinstance(form, TableForm) or not form.makes_requests:
        return
    targets = (form.model_column, form.adapter_column)  # what they name is known in the rows alone
    cells = dict.fromkeys(form.columns(), "text") | dict.fromkeys(filter(None, targets), "")
    cells |= {} if form.template is None else {PROMPT: "text"}
    sample = msgspec.json.encode(cells)
    request = form.request(Row(0, 0, sample, form))
    OpenAIRules(order).route(request.url, Raw(request.body))


def _without_additions(members: dict[str, Raw], form: TableForm) -> RowError | None:
    """Take what sealing has added out of a row. Returns: why that is not all it should be; None: it is."""
    if (fault := fault_of(members)) is not None:
        return fault
    members.pop(MEDIA, None)
    if form.template is not None and members.pop(PROMPT, None) is None:
        return RowError("invalid_json", "the values of the row cannot be read: a number of it is too large")
    return None


def _model_of(body: bytes | Raw) -> str | None:
    try:
        return _model(body).model
    except DECODE_ERRORS as error:
        raise InvalidRow(f"body.model must be a string ({error})", code="invalid_field") from None


def _is_path(url: str) -> bool:
    return url.startswith("/") and len(url) <= URL_CHARS_MAX and url.isprintable() and " " not in url


def _check_id(custom_id: str) -> None:
    if not custom_id:
        raise InvalidRow("custom_id is empty", code="invalid_custom_id")
    if len(custom_id) > CUSTOM_ID_CHARS_MAX:
        raise InvalidRow(
            f"custom_id {quoted(custom_id)} is longer than {CUSTOM_ID_CHARS_MAX} characters", code="invalid_custom_id"
        )
    if "\0" in custom_id:
        raise InvalidRow(f"custom_id {quoted(custom_id)} holds a NUL", code="invalid_custom_id")


def _refusal(line: bytes, error: InvalidRow) -> CheckedLine:
    return CheckedLine(id_of(line), _row_error(error))


def _row_error(error: InvalidRow) -> RowError:
    return RowError(error.code, error.message)


def _explain(line: bytes, error: Exception) -> InvalidRow:
    """Why a line is not a valid RowLine: the first wrong field."""
    try:
        fields = _members(line)
    except DECODE_ERRORS as broken:
        return _not_object(line, broken)
    for name in fields:
        if name not in _FIELDS:
            hint = _nearest(name, _FIELDS)
            return InvalidRow(
                f"unknown field {quoted(name)}; a row has custom_id, method, url and body{hint}", code="unknown_field"
            )
    for name in ("custom_id", "url", "method"):
        if name not in fields:
            if name == "method":
                continue
            code = "missing_custom_id" if name == "custom_id" else "invalid_url"
            return InvalidRow(f"the row has no {name}", code=code)
        if bytes(memoryview(fields[name])[:1]) != b'"':
            return InvalidRow(f"{name} is {_kind_of(fields[name])}; it must be a string", code=f"invalid_{name}")
    if "body" not in fields:
        return InvalidRow("the row has no body", code="missing_body")
    return InvalidRow(f"the row cannot be read: {error}", code="invalid_json")


def _not_object(line: bytes, error: Exception) -> InvalidRow:
    if isinstance(error, RecursionError):
        return InvalidRow("the JSON is nested too deep", code="nesting_too_deep")
    try:
        value = _any(line)
    except DECODE_ERRORS as broken:
        hint = _line_ends(line)
        return InvalidRow(f"not JSON: {str(broken).removeprefix('JSON is malformed: ')}{hint}", code="invalid_json")
    return InvalidRow(f"the line is JSON but not an object: {quoted(value)}", code="invalid_json")


def _line_ends(line: bytes) -> str:
    """A hint for lines that end with CR alone, as old Macintosh programs write them: they count as one line."""
    if b"\r" not in line.rstrip(b"\r\n"):
        return ""
    return "; lines seem to end with CR alone: convert the file with `tr '\\r' '\\n'`"


def _kind(value: Raw) -> str:
    match bytes(memoryview(value)[:1]):
        case b"[":
            return "an array"
        case b"{":
            return "an object"
        case b'"':
            return "a string"
        case b"n":
            return "null"
        case b"t" | b"f":
            return "true or false"
        case _:
            return "a number"


def _kind_of(value: Raw) -> str:
    """Describe a value for a message, with its type unless obvious: `null`; `7, a number`; `[1, 2], an array`."""
    text = bytes(value).decode(errors="replace")
    text = text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
    return text if text in ("null", "true", "false") else f"{text}, {_kind(value)}"


def quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def _nearest(name: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
