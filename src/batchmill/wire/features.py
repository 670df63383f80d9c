"""What a body may have a service do besides answer: spend more, reach elsewhere, or read what its account holds.

The account is the operator's. Callers of a server share it, so that each of these is closed to them until
`models.NAME.features` names it; whoever runs a job by a command of the machine is not bounded.
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
    TOOLS: "the service would run it at its own price, and reach other places with it",
    TIER: "the service would charge more for it",
    MODELS: "the service would run a model that the caller did not name",
}
NOTHING = (b"null", b"false", b'""', b"[]", b"{}")
TIERS = ("auto", "default", "flex", "standard", "standard_only")  # that cost no more than none
# Tools that the caller runs; the versions of Anthropic's have dates.
_OWN_TOOL = re.compile(
    r"function|custom|local_shell|apply_patch|computer|computer_use_preview"
    r"|(bash|text_editor|computer|memory)_[0-9]{8}"
)
_IDS = frozenset({"file_id", "file_ids", "vector_store_ids", "container_id", "container"})
_CALLERS_OWN = ("parameters", "input_schema")  # schemas of the caller's own tools, in which a name is a name
# Whether an id may stand anywhere in a body: its letters, or an escape of one that a name could hide behind.
_MAY_NAME = re.compile(rb'"(?:file_id|vector_store_id|container|item_reference)|\\u00(?:5[fF]|[67])')


class Guarded(Struct, gc=False):
    """The members of a body that are looked into; the structs of bodies extend it."""

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
_MAY_REFER = re.compile(rb'"id"|\\u')  # an item that is a reference has a member "id", perhaps written with escapes
_NAMES = tuple(Guarded.__struct_fields__)
_any = msgspec.json.Decoder().decode


def features_of(model: ModelSpec) -> frozenset[str]:
    """What callers may have a model do; of one with routes what each way may.

    An engine that runs here has no prices, and no tools but those that it was started with.
    """
    if model.needs_route:
        return frozenset(FEATURES).intersection(*map(features_of, model.routes))
    return frozenset(model.features).union((TOOLS, TIER, MODELS) if model.traits.is_local else ())


def check_features(features: Collection[str]) -> None:
    """Raises: InvalidInput for a name that is none."""
    for each in features:
        if each not in FEATURES:
            raise InvalidInput(f"features: {each[:80]!r} is none; there are {', '.join(FEATURES)}")


def check(found: Guarded, body: bytes | Raw, features: frozenset[str]) -> None:
    """Refuse a body that asks for what is not among `features`. Raises: InvalidRow, `parameter_not_allowed`."""
    said = [name for name in _NAMES if getattr(found, name) is not UNSET]
    may_name = _MAY_NAME.search(body) is not None
    if not (said or may_name):
        return
    for name in said:
        value = bytes(getattr(found, name))
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
    if STORED not in features and may_name and (name := next(_ids(_any(body)), None)) is not None:
        raise _refusal(f"`{name}` in the body", STORED)
    _refuse_repeats(body)


def check_response(prompt: Raw | UnsetType, input_: Raw, features: frozenset[str]) -> None:
    """As `check`, of what only a body of the Responses API has: prompts and items that the account holds."""
    if STORED in features:
        return
    if prompt is not UNSET and bytes(prompt) not in NOTHING:
        raise _refusal("body.prompt", STORED)
    items = _any(input_) if _MAY_REFER.search(input_) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and (item.get("type") == "item_reference" or {"id"} == set(item) - {"type"}):
            raise _refusal("an item of body.input that is a reference", STORED)


def _hosted(tools: Any) -> str | None:
    """The first tool that the service itself would run, as a message names it."""
    for tool in tools if isinstance(tools, list) else [tools]:
        if not isinstance(tool, dict):
            return "what is no object"
        kind = tool.get("type")
        is_own = "name" in tool and "input_schema" in tool if kind is None else isinstance(kind, str)
        if not is_own or (kind is not None and _OWN_TOOL.fullmatch(kind) is None):
            return f"the type {kind!r:.80}"
    return None


def _ids(value: Any) -> Iterator[str]:
    """The members of a body, however deep, that name something of the account."""
    open_ = [value]
    while open_:
        at = open_.pop()
        if isinstance(at, dict):
            yield from (name for name in at if name in _IDS and at[name] and not isinstance(at[name], dict))
            open_ += (at[name] for name in at if name not in _CALLERS_OWN and at.get("type") != "tool_use")
        elif isinstance(at, list):
            open_ += at


def _refuse_repeats(body: bytes | Raw) -> None:
    """A member that stands twice is read in one way here, and may be in another there. Raises: InvalidRow."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise InvalidRow("a member of the body stands twice in one object: write it once", code="invalid_field")
        return made

    try:
        json.loads(bytes(body), object_pairs_hook=members)
    except (RecursionError, ValueError) as error:
        raise InvalidRow(f"the body cannot be read: {error}", code="invalid_field") from None


def _refusal(what: str, feature: str) -> InvalidRow:
    return InvalidRow(
        f"{what} is not allowed: {FEATURES[feature]}; the operator of the server can allow it with "
        f"models.NAME.features = [{feature!r}]",
        code="parameter_not_allowed",
    )
