"""The actions that a connector means without saying so: how a provider is asked for a batch job, and told to end it.

Source: ML Commons' `ConnectorUtils.createConnectorAction`. Beyond it: an action that is given counts though it has no
body; `parameters.provider` may name the provider; a query stays behind the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.connectors.urls import own_url
from batchmill.types.connectors import (
    BATCH_PREDICT,
    BATCH_PREDICT_STATUS,
    CANCEL_BATCH_PREDICT,
    PREDICT,
    Action,
    Connector,
)

_PROVIDERS = ("sagemaker", "openai", "bedrock", "cohere")  # the first whose name is in the URL
_BY_OPENAI = {"azure": "openai"}  # who speaks as another does
_TRANSFORM_JOB = '{ "TransformJobName" : "${parameters.TransformJobName}"}'


def find_action(connector: Connector, kind: str) -> Action:
    """The action of a type or name, with the headers of `predict` where it has none of its own.

    Raises: InvalidInput, `unknown_action`: there is none, and none follows from the others.
    """
    action = connector.action(kind)
    if action is None and kind in (BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT):
        action = _derive(connector, kind)
    if action is None:
        raise InvalidInput(f"no {kind} action found", code="unknown_action")
    if action.headers or action.action_type == PREDICT:
        return action
    predict = connector.action(PREDICT)
    return action if predict is None else replace(action, headers=predict.headers)


def provider_of(connector: Connector) -> str | None:
    """Whose batch API a connector calls, as `parameters.provider` or else its URL says; None: nobody knows."""
    batch = connector.action(BATCH_PREDICT)
    if batch is None:
        return None
    said = connector.parameters.get("provider", "").lower()
    said = _BY_OPENAI.get(said, said)
    url = own_url(batch.url, connector.parameters)
    return said if said in _PROVIDERS else next((each for each in _PROVIDERS if each in url), None)


def remote_parameters(remote_job: Mapping[str, Any]) -> dict[str, str]:
    """What a remote job says of itself, as parameters of the calls about it: its members that are text.

    Beside them `TransformJobName`, `processedJobArn` and `id` where another member says the same.
    """
    found = {name: value for name, value in remote_job.items() if isinstance(value, str)}
    if "TransformJobArn" in found:
        found.setdefault("TransformJobName", found["TransformJobArn"].rpartition("/")[2])
    if "jobArn" in found:
        found.setdefault("processedJobArn", found["jobArn"].replace("/", "%2F"))
    if "job_id" in found:
        found.setdefault("id", found["job_id"])  # Cohere's name for it
    return found


def _derive(connector: Connector, kind: str) -> Action:
    batch = connector.action(BATCH_PREDICT)
    if batch is None:
        raise InvalidInput("no BATCH_PREDICT action found", code="unknown_action")
    is_cancel = kind == CANCEL_BATCH_PREDICT
    url = own_url(batch.url, connector.parameters)
    match provider_of(connector):
        case "sagemaker":
            verb = "StopTransformJob" if is_cancel else "DescribeTransformJob"
            there = url.replace("CreateTransformJob", verb)
            return Action(kind, "POST", there, headers=batch.headers, request_body=_TRANSFORM_JOB)
        case "openai" | "cohere":
            path = "/${parameters.id}" + ("/cancel" if is_cancel else "")
        case "bedrock":
            path = "/${parameters.processedJobArn}" + ("/stop" if is_cancel else "")
        case _:
            what = "to cancel the batch job" if is_cancel else "to get the batch job details"
            raise InvalidInput(f"Please configure the action type {what} in the connector", code="unknown_action")
    head, mark, query = url.partition("?")
    there = f"{head.rstrip('/')}{path}{mark}{query}"
    return Action(kind, "POST" if is_cancel else "GET", there, headers=batch.headers)
