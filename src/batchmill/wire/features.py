"""Features of services that a body may use: spending more, reaching other hosts, or reading data of the account.

The account is the operator's, and all callers of a server share it. So each feature is refused until
`models.NAME.features` allows it. Jobs that a command on the machine runs are not restricted.
Sources: OpenAI's, Azure OpenAI's, Anthropic's and OpenRouter's API references.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from batchmill.errors import InvalidInput, InvalidRow
from batchmill.types import ModelSpec

BACKGROUND, STORED, TOOLS, TIER, MODELS = "background", "stored", "hosted_tools", "priority_tier", "other_models"
FEATURES = {
    BACKGROUND: "the service stores the answer, and no caller can fetch it",
    STORED: "it refers to data in the service's account, which all callers share",
    TOOLS: "the service would run it at its own price, and reach other hosts with it",
    TIER: "the service would charge more for it",
    MODELS: "the service would run a model that the caller did not name",
}
NOTHING = (b"null", b"false", b'""', b"[]", b"{}")
TIERS = ("auto", "default", "flex", "standard", "standard_only")  # tiers that cost no more than the default
# Tools that the caller runs. Anthropic's tools have a date as their version.
_CALLER_TOOL = re.compile(
    r"function|custom|local_shell|apply_patch|computer|computer_use_preview"
    r"|(bash|text_editor|computer|memory)_[0-9]{8}"
)
_IDS = frozenset({"file_id", "file_ids", "vector_store_ids", "container_id", "container"})
_CALLER_SCHEMAS = (
    "parameters",
    "input_schema",
)  # schemas of the caller's own tools; their property names are not references
# Finds bodies that may hold an id: the member names, or JSON escapes that could hide their letters.
_MAY_NAME = re.compile(rb'"(?:file_id|vector_store_id|container|item_reference)|\\u00(?:5[fF]|[67])')


class Guarded(Struct, gc=False):
    """The members of a body that `check` reads; the structs of bodies extend it."""

    background: Raw | UnsetType = UNSET
    previous_response_id: Raw | UnsetType = UNSET
    conversation: Raw | UnsetType = UNSET
    container: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET
    plugins: Raw | UnsetType = UNSET
    mcp_servers: Raw | UnsetType = UNSET
    data_sources: Raw | UnsetType = UNSET
    service_tier: Raw | UnsetType = UNSET
    models: Raw | UnsetType = UNSET
    fallbacks: Raw | UnsetType = UNSET


_PLAIN = {
    "background": BACKGROUND, "previous_response_id": STORED, "conversation": STORED, "container": STORED,
    "web_search_options": TOOLS, "plugins": TOOLS, "mcp_servers": TOOLS, "data_sources": TOOLS,
    "models": MODELS, "fallbacks": MODELS,
}  # fmt: skip
_MAY_REFER = re.compile(rb'"id"|\\u')  # an item that is a reference has a member "id", perhaps with JSON escapes
_NAMES = tuple(Guarded.__struct_fields__)
_any = msgspec.json.Decoder().decode


def features_of(model: ModelSpec) -> frozenset[str]:
    """Return the features that callers of a model may use; for a model with routes, those that all routes allow.

    A local engine has no prices, and only the tools that it was started with.
    """
    if model.needs_route:
        return frozenset(FEATURES).intersection(*map(features_of, model.routes))
    return frozenset(model.features).union((TOOLS, TIER, MODELS) if model.traits.is_local else ())


def check_features(features: Collection[str]) -> None:
    """Raises: InvalidInput for an unknown feature."""
    for each in features:
        if each not in FEATURES:
            raise InvalidInput(f"features: {each[:80]!r} is unknown; there are {', '.join(FEATURES)}")


def check(members: Guarded, body: bytes | Raw, features: frozenset[str]) -> None:
    """Refuse a body that uses a feature that is not in `features`. Raises: InvalidRow, `parameter_not_allowed`."""
    present = [name for name in _NAMES if getattr(members, name) is not UNSET]
    may_name = _MAY_NAME.search(body) is not None
    if not (present or may_name):
        return
    for name in present:
        value = bytes(getattr(members, name))
        if value in NOTHING:
            continue
        if name == "tools":
            if TOOLS not in features and (kind := _hosted(_any(value))) is not None:
                raise _refusal(f"body.tools with {kind}", TOOLS)
        elif name == "service_tier":
            if TIER not in features and _any(value) not in TIERS:
                raise _refusal(f"body.service_tier {_any(value)!r:.80}", TIER)
        elif _PLAIN[name] not in features:
            raise _refusal(f"body.{name}", _PLAIN[name])
    if STORED not in features and may_name and (name := next(_account_references(_any(body)), None)) is not None:
        raise _refusal(f"`{name}` in the body", STORED)
    _refuse_repeats(body)


def check_response(prompt: Raw | UnsetType, input_: Raw, features: frozenset[str]) -> None:
    """Check what only the Responses API has: stored prompts and items. Raises as `check`."""
    if STORED in features:
        return
    if prompt is not UNSET and bytes(prompt) not in NOTHING:
        raise _refusal("body.prompt", STORED)
    items = _any(input_) if _MAY_REFER.search(input_) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and (item.get("type") == "item_reference" or {"id"} == set(item) - {"type"}):
            raise _refusal("an item of body.input that is a reference", STORED)


def _hosted(tools: Any) -> str | None:
    """Return the first tool that the service would run, as an error message names it."""
    for tool in tools if isinstance(tools, list) else [tools]:
        if not isinstance(tool, dict):
            return "a value that is not an object"
        kind = tool.get("type")
        is_of_caller = "name" in tool and "input_schema" in tool if kind is None else isinstance(kind, str)
        if not is_of_caller or (kind is not None and _CALLER_TOOL.fullmatch(kind) is None):
            return f"the type {kind!r:.80}"
    return None


def _account_references(value: Any) -> Iterator[str]:
    """Yield the member names, at any depth, that refer to data of the account."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield from (name for name in node if name in _IDS and node[name] and not isinstance(node[name], dict))
            stack += (node[name] for name in node if name not in _CALLER_SCHEMAS and node.get("type") != "tool_use")
        elif isinstance(node, list):
            stack += node


def _refuse_repeats(body: bytes | Raw) -> None:
    """Refuse repeated members: parsers differ in which of the two they read. Raises: InvalidRow."""

    def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise InvalidRow("an object of the body has a member twice: write it once", code="invalid_field")
        return members

    try:
        json.loads(bytes(body), object_pairs_hook=unique_members)
    except (RecursionError, ValueError) as error:
        raise InvalidRow(f"the body cannot be read: {error}", code="invalid_field") from None


def _refusal(parameter: str, feature: str) -> InvalidRow:
    return InvalidRow(
        f"{parameter} is not allowed: {FEATURES[feature]}; the operator of the server can allow it with "
        f"models.NAME.features = [{feature!r}]",
        code="parameter_not_allowed",
    )
