"""Turns rows and live requests into calls of vLLM, and refuses fields that vLLM would ignore."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from batchmill.datasets.media.loading import request_of
from batchmill.engines.llm.adapters import Adapter, AdapterNames
from batchmill.engines.llm.quarantine import Tracked
from batchmill.engines.llm.request_bounds import RequestLimits
from batchmill.errors import InvalidInput, InvalidRow, UnknownName
from batchmill.models.paths import paths_of
from batchmill.types import AdapterSet, LiveRequest, ModelSpec, Row, RowError
from batchmill.wire import fields
from batchmill.wire.fields import KNOWN_FIELDS, refusal, unknown_fields
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.rows.forms import CLASSIFY, with_model

POLICY_FLAG = "scheduling-policy"
LIVE_PRIORITY = -(2**31)  # lower goes first; rows have 0, or their own value
NAMES_SHOWN = 20
SHOWN_CHARS = 100  # of a path, in a message


class LlmRow:
    """One row with all its attempts."""

    __slots__ = (
        "adapter",
        "adapter_was_loaded",
        "attempts",
        "body",
        "deaths",
        "must_run_alone",
        "row",
        "tracked",
        "turn",
        "url",
    )

    def __init__(
        self, row: Row, url: str, body: bytes, adapter: Adapter | None = None, tracked: Tracked | None = None
    ) -> None:
        self.row = row
        self.url = url
        self.body = body
        self.adapter = adapter
        self.turn = -1  # its position among the waiting rows, once it has one
        self.adapter_was_loaded = True  # its adapter was loaded when the row could have been sent
        self.attempts = 0  # failed calls that the server survived
        self.deaths = 0  # of the server, while this row was in flight
        self.tracked = tracked or Tracked("", "", url, body, adapter)
        self.must_run_alone = False  # it must run with no other row in flight

    @property
    def project(self) -> str:
        return self.tracked.project


class _Head(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head)


class LlmCalls:
    """Builds the calls of one model. `known`: the fields that its server understands, by URL."""

    def __init__(self, model: ModelSpec, known: Mapping[str, frozenset[str]] = KNOWN_FIELDS) -> None:
        self._bases = {name for name, adapter in model.targets().items() if adapter is None}
        self._adapters = model.adapter_set()
        self._takes_adapters = bool(model.adapters or model.adapter_rank)
        self._model, self._source = model.name, model.source
        self._paths = paths_of(model) or frozenset()
        self._live_paths = self._paths | {CLASSIFY}
        self.limits = model.limits
        self._bounds = RequestLimits(model.limits)
        self._has_priority = has_priority(model.engine_args)
        self.names = AdapterNames()
        self.known = known

    def live(self, request: LiveRequest) -> tuple[bytes, Adapter | None]:
        """The body and the adapter of a live request. Raises: InvalidInput."""
        url = request.url
        if url not in self._live_paths:
            paths = ", ".join(sorted(self._live_paths))
            raise UnknownName(f"no engine answers {url[:SHOWN_CHARS]!r}; choose from {paths}", code="unknown_url")
        try:
            request.body.decode()  # fields that are not parsed must be text too
            members = fields.translate_fields(split_object(request.body))
            model = _head.decode(request.body).model or self._model
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body cannot be read as a request: {error}", code="invalid_json") from None
        if "priority" in members:
            text = "`priority` cannot be set: a live request goes ahead of every row; leave it out"
            raise InvalidInput(text, code="parameter_not_allowed")
        if unknown := unknown_fields(url, members, self.known):
            raise InvalidInput(refusal(url, unknown, self.known), code="unknown_parameter")
        self._bounds.check(url, members)
        adapter = self._live_adapter(request, model)
        members["model"] = msgspec.Raw(msgspec.json.encode(self.names.of(adapter) if adapter else model))
        if self._has_priority and "priority" in self.known.get(url, members):
            members["priority"] = msgspec.Raw(b"%d" % LIVE_PRIORITY)
        return join_object(members), adapter

    def _live_adapter(self, request: LiveRequest, model: str) -> Adapter | None:
        if request.adapter is not None and request.adapter_place and self._takes_adapters:
            return Adapter(request.adapter, request.adapter_place)
        adapter = self._adapter(self._adapters, request.adapter or model)
        if isinstance(adapter, RowError):
            if adapter.code == "bad_adapter":
                raise InvalidInput(adapter.message, code=adapter.code)
            raise UnknownName(adapter.message, code="model_not_found")
        return adapter

    def _adapter(self, adapters: AdapterSet, name: str) -> Adapter | RowError | None:
        """The adapter that a body's model name means; None for the base model."""
        if name in self._bases:
            return None
        own = adapters.names.get(name, name)
        if own in adapters.bad:
            return RowError("bad_adapter", adapters.bad[own])
        path = adapters.places.get(own) if self._takes_adapters else None
        if path is not None:
            return Adapter(own, path)
        return RowError("unknown_model", f"the model {name!r} is not served here; choose from {self._served(adapters)}")

    def _served(self, adapters: AdapterSet) -> str:
        names = sorted({*self._bases, *adapters.places, *adapters.names})
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return ", ".join(names[:NAMES_SHOWN]) + more

    def read(self, row: Row) -> LlmRow | RowError:
        """The call of a row, or the error of a row that cannot be called."""
        try:
            return self._read(row)
        except InvalidRow as error:
            return RowError(error.code, error.message)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return RowError("invalid_row", f"the row cannot be read as a request: {error}")

    def _read(self, row: Row) -> LlmRow | RowError:
        request = request_of(row)
        if request.url not in self._paths:
            paths = ", ".join(sorted(self._paths))
            raise InvalidRow(
                f"no engine answers {request.url[:SHOWN_CHARS]!r}; choose from {paths}", code="unknown_url"
            )
        translated = fields.translate_body(request.body)
        members = split_object(translated)
        if unknown := unknown_fields(request.url, members, self.known):
            raise InvalidRow(refusal(request.url, unknown, self.known), code="unknown_parameter")
        self._bounds.check(request.url, members)
        head = _head.decode(translated)
        if head.stream:
            raise InvalidRow("a row's answer cannot be streamed: leave `stream` out", code="invalid_parameter")
        if not head.model:
            return self._call(row, request.url, with_model(translated, self._model))
        adapters: AdapterSet | None = getattr(row.lease, "adapters", None)
        adapter = self._adapter(self._adapters if adapters is None else adapters, head.model)
        if adapter is None:
            return self._call(row, request.url, translated)
        if isinstance(adapter, RowError):
            return adapter
        name = self.names.of(adapter)
        body = translated if name == head.model else with_model(translated, name)
        return self._call(row, request.url, body, adapter)

    def _call(self, row: Row, url: str, body: bytes, adapter: Adapter | None = None) -> LlmRow:
        return LlmRow(row, url, body, adapter, self.tracked(getattr(row.lease, "project", ""), url, body, adapter))

    def tracked(self, project: str, url: str, body: bytes, adapter: Adapter | None) -> Tracked:
        return Tracked(project, self._source, url, body, adapter)


def has_priority(engine_args: Mapping[str, object]) -> bool:
    """Whether the server orders calls by priority: it does unless the caller configured otherwise."""
    policies = [value for name, value in engine_args.items() if name.lstrip("-").replace("_", "-") == POLICY_FLAG]
    return not policies or policies[-1] == "priority"


def stable_code(code: str) -> str:
    """Give vLLM's error types one spelling: "BadRequestError" and "Bad Request" both become bad_request."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", code.strip())
    return words.lower().removesuffix("_error")
