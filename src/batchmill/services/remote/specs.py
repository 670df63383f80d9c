"""A connector as the models of a job: row by row through its `predict`, whole shards through the provider's batch API,
or either. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.connectors.urls import own_url
from batchmill.models.providers import PROVIDERS
from batchmill.types import Connector, Limits, ModelSpec
from batchmill.types.connectors import BATCH_PREDICT, PREDICT

AUTO, BATCH, ONLINE = "auto", "batch", "online"
ROUTES = (AUTO, BATCH, ONLINE)
PROVIDER = "provider"  # the parameter of a connector that says whose batch API it speaks
_HOSTS = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "api.cohere.com": "cohere",
    "api.cohere.ai": "cohere",
}
_AZURE = ".openai.azure.com"
_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_AWS_SERVICES = {"api.sagemaker": "sagemaker", "bedrock": "bedrock"}


def provider_of(connector: Connector) -> str | None:
    """Whose batch API the `batch_predict` action calls; None: there is no such action, or nobody knows the API.

    Raises: InvalidInput where the connector names a provider that nobody knows.
    """
    action = connector.action(BATCH_PREDICT)
    if action is None:
        return None
    named = connector.parameters.get(PROVIDER)
    if named is not None:
        if named not in PROVIDERS:
            raise InvalidInput(
                f"the connector {connector.name!r} names the provider {named[:40]!r}: known are {', '.join(PROVIDERS)}",
                code="unknown_provider",
            )
        return named
    host = (urlsplit(own_url(action.url, connector.parameters)).hostname or "").lower()
    if host in _HOSTS:
        return _HOSTS[host]
    if host.endswith(_AZURE):
        return "azure"
    if host.endswith(_AWS):
        service = host.removesuffix(".cn").removesuffix(".amazonaws.com").rpartition(".")[0]
        return _AWS_SERVICES.get(service.removesuffix("-fips"))
    return None


def spec_of(
    name: str, connector: Connector, *, alias: str | None = None, limits: Limits = Limits(), route: str = AUTO
) -> ModelSpec:
    """The model that `name` is, with the connector in it: what changes later changes no job that has begun.

    Args:
        alias: what else its rows may call it.
        route: "batch" or "online" for one way alone; "auto" for whichever there are.

    Raises: InvalidInput where that way, or any, does not exist.
    """
    provider = provider_of(connector)
    source = connector.parameters.get("model") or connector.name
    online = ModelSpec(name, "connector", source, connector=connector, alias=alias, limits=limits)
    ways = []
    if provider is not None and route != ONLINE:
        ways.append(replace(online, engine="provider_batch", provider=provider))
    if connector.action(PREDICT) is not None and route != BATCH:
        ways.append(online)
    if not ways:
        raise InvalidInput(_no_way(connector, route), code="no_route")
    return ways[0] if len(ways) == 1 else ModelSpec(name, "routes", source, alias=alias, routes=ways, limits=limits)


def _no_way(connector: Connector, route: str) -> str:
    place = f"the connector {connector.name!r}"
    if connector.action(BATCH_PREDICT) is not None and route != ONLINE:
        return (
            f"{place} hands batches to a service whose batch API nobody knows here: where it speaks OpenAI's, say so "
            f'with the parameter "{PROVIDER}": "openai"' + ("" if route == BATCH else "; or give it a predict action")
        )
    missing = {BATCH: "batch_predict action", ONLINE: "predict action"}.get(
        route, "predict action and no batch_predict"
    )
    return f"{place} has no {missing}: no row of a job can go through it"
