"""The actions of a connector, read from what somebody wrote, and the rules they must keep."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.models.connectors.fields import invalid, read_flag, read_text, read_texts
from batchmill.models.connectors.headers import HeaderTemplates, check_headers
from batchmill.models.connectors.postprocessing import POST_PROCESS
from batchmill.models.connectors.preprocessing import PRE_PROCESS
from batchmill.models.connectors.urls import UrlTemplate, has_open_host, own_url
from batchmill.types.connectors import (
    BATCH_PREDICT,
    BATCH_PREDICT_STATUS,
    CANCEL_BATCH_PREDICT,
    PREDICT,
    Action,
)
from batchmill.wire.json_templates import JsonTemplate
from batchmill.wire.placeholders import CREDENTIAL, Hole, holes, split

ACTION_TYPES = (PREDICT, "EXECUTE", BATCH_PREDICT, CANCEL_BATCH_PREDICT, BATCH_PREDICT_STATUS)
METHODS = ("POST", "GET", "PUT", "DELETE")
ACTIONS_MAX = 64
NAME_CHARS_MAX = 64

_NAME = re.compile(r"[A-Za-z0-9_-]+")
FIELDS = Action.__struct_fields__


def read_actions(value: Any) -> list[Action]:
    """The actions of a connector, still to be checked. Raises: InvalidInput."""
    if not value:
        raise invalid("No actions configured for this connector")
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise invalid("`actions` is a list of objects")
    if len(value) > ACTIONS_MAX:
        raise invalid(f"a connector has at most {ACTIONS_MAX} actions; these are {len(value)}")
    return [_read_action(each) for each in value]


def _read_action(fields: Mapping[str, Any]) -> Action:
    kind = read_text(fields, "action_type")
    name = read_text(fields, "name")
    url, method = read_text(fields, "url"), read_text(fields, "method")
    if kind is None:
        raise invalid("action type can't be null")
    if kind.upper() not in ACTION_TYPES:
        raise invalid(f"No enum constant org.opensearch.ml.common.connector.ConnectorAction.ActionType.{kind.upper()}")
    if url is None:
        raise invalid("url can't be null")
    if method is None:
        raise invalid("method can't be null")
    if method.upper() not in METHODS:
        raise invalid(f"unsupported http method: {method[:20]}")
    _check_name(name)
    return Action(
        kind.upper(),
        method.upper(),
        url.strip(),
        headers=read_texts(fields, "headers"),
        request_body=read_text(fields, "request_body"),
        pre_process_function=read_text(fields, "pre_process_function") or None,
        post_process_function=read_text(fields, "post_process_function") or None,
        name=name,
        supports_structured_output=read_flag(fields, "supports_structured_output"),
    )


def unknown_fields(fields: Mapping[str, Any]) -> Iterable[str]:
    """The members of an action that mean nothing."""
    return [name for name in fields if name not in FIELDS]


def _check_name(name: str | None) -> None:
    if name is None:
        return
    if any(ord(each) < 32 for each in name):
        raise invalid("Action name must not contain control characters")
    if len(name) > NAME_CHARS_MAX:
        raise invalid(f"Action name exceeds maximum length of {NAME_CHARS_MAX} characters")
    if not _NAME.fullmatch(name):
        raise invalid(
            "Action name contains invalid characters. "
            "Only alphanumeric characters, hyphens, and underscores are allowed"
        )
    if name.upper() in ACTION_TYPES:
        raise invalid(f"name can't be one of action type [{', '.join(ACTION_TYPES)}]")


def check_action(action: Action, parameters: Mapping[str, str]) -> None:
    """Whatever can be known of an action before it is called. Raises: InvalidInput."""
    kind = action.action_type
    _refuse_credentials(action.url, f"the url of the action {kind}")
    _refuse_credentials(action.request_body or "", f"the request_body of the action {kind}")
    check_headers(action.headers)
    url = own_url(action.url, parameters)
    if has_open_host(url):
        raise InvalidInput(
            f"the url of the action {kind} does not say where it leads: {url[:200]}; "
            "its host is filled from the connector's own parameters alone",
            code="invalid_url",
        )
    # With each placeholder that is left in it filled, it must be a URL.
    UrlTemplate("".join("x" if isinstance(piece, Hole) else piece for piece in split(url)), {})
    HeaderTemplates(action.headers, parameters)
    JsonTemplate(action.request_body or "", parameters)
    _check_function(action.pre_process_function, PRE_PROCESS, f"the pre_process_function of the action {kind}")
    _check_function(action.post_process_function, POST_PROCESS, f"the post_process_function of the action {kind}")


def _refuse_credentials(text: str, place: str) -> None:
    found = next((hole for hole in holes(text) if hole.scope == CREDENTIAL), None)
    if found is not None:
        raise InvalidInput(
            f"{place} holds {found.text}: credentials stand in headers only, where nobody logs them",
            code="misplaced_credential",
        )


def _check_function(name: str | None, known: Iterable[str], place: str) -> None:
    if name is None or name in known:
        return
    if not re.fullmatch(r"[A-Za-z0-9_.]{1,100}", name):
        raise InvalidInput(
            f"{place} is a Painless script, and scripts are not run here: use one of the built-in functions "
            f"({', '.join(known)}), `response_filter`, or a template that needs none",
            code="painless_not_supported",
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
    raise InvalidInput(f"{place} is {name!r}, which is no built-in function{hint}", code="painless_not_supported")
