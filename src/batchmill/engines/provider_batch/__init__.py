"""The engine for providers' batch APIs, which submits whole shards, and the providers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.engines.provider_batch.provider import ProviderApi
from batchmill.errors import ModelFailed
from batchmill.optional import require
from batchmill.types import ModelSpec

if TYPE_CHECKING:
    from batchmill.engines.connections import Connections


PROVIDER_APIS = {
    "openai": "batchmill.engines.provider_batch.openai:OpenAIBatches",
    "azure": "batchmill.engines.provider_batch.openai:AzureBatches",
    "anthropic": "batchmill.engines.provider_batch.anthropic:AnthropicBatches",
    "cohere": "batchmill.engines.provider_batch.cohere:CohereBatches",
    "gemini": "batchmill.engines.provider_batch.gemini:GeminiBatches",
    "sagemaker": "batchmill.engines.provider_batch.sagemaker:SageMakerBatches",
    "bedrock": "batchmill.engines.provider_batch.bedrock:BedrockBatches",
}


def load_provider(model: ModelSpec, connections: Connections) -> ProviderApi:
    """Create the batch API of a model's provider.

    Raises: ModelFailed for an unknown provider, or one whose extra is not installed.
    """
    name = model.provider or "openai"
    if name not in PROVIDER_APIS:
        names = ", ".join(PROVIDER_APIS)
        raise ModelFailed(f"there is no batch provider {name!r}; choose from {names}", code="unknown_provider")
    return require(PROVIDER_APIS[name], f"the provider {name}", ModelFailed)(model, connections)
