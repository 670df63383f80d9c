"""The engine that hands whole shards to a provider's own batch API, and the providers by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from batchmill.engines.provider_batch.provider import ProviderApi
from batchmill.errors import ModelFailed
from batchmill.types import ModelSpec

if TYPE_CHECKING:
    from batchmill.engines.connections import Connections


PROVIDER_APIS = {
    "openai": "batchmill.engines.provider_batch.openai:OpenAIBatches",
    "azure": "batchmill.engines.provider_batch.openai:AzureBatches",
    "anthropic": "batchmill.engines.provider_batch.anthropic:AnthropicBatches",
    "cohere": "batchmill.engines.provider_batch.cohere:CohereBatches",
    "sagemaker": "batchmill.engines.provider_batch.sagemaker:SageMakerBatches",
    "bedrock": "batchmill.engines.provider_batch.bedrock:BedrockBatches",
}

EXTRAS = {"botocore": "aws"}  # what a provider needs, and the extra of ours that brings it


def load_provider(model: ModelSpec, connections: Connections) -> ProviderApi:
    """The batch API of a model's provider.

    Raises: ModelFailed for a provider nobody knows, or one whose extra is not installed.
    """
    name = model.provider or "openai"
    if name not in PROVIDER_APIS:
        known = ", ".join(PROVIDER_APIS)
        raise ModelFailed(f"no batch provider is called {name!r}; there are {known}", code="unknown_provider")
    module, _, attribute = PROVIDER_APIS[name].partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        text = f"the provider {name} needs {missing}: pip install 'batchmill[{EXTRAS[missing]}]'"
        raise ModelFailed(text, code="missing_dependency") from None
    return found(model, connections)
