"""Properties of providers' batch APIs: rows and bytes of one job, time, address and key.

Sources: OpenAI's, Azure OpenAI's, Anthropic's, Cohere's, Gemini's, SageMaker's and Bedrock's documentation. Limits that
differ between accounts can be set as engine arguments.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec import Struct

from batchmill.types import ModelSpec

DAY_S = 86_400.0
MB, MIB = 1_000_000, 1024 * 1024
GEMINI_URL = "https://generativelanguage.googleapis.com"


class Provider(Struct, frozen=True):
    """One batch API. `bytes_max` is for the upload of one job."""

    name: str
    rows_max: int
    bytes_max: int
    window_s: float = DAY_S  # the provider's completion window
    base_url: str | None = None  # None: configured, or derived from a region
    key: str | None = None  # the default reference to its key
    sends_paths: bool = True  # a row has a path; otherwise only the model decides what it does


PROVIDERS = {
    each.name: each
    for each in (
        Provider("openai", 50_000, 200 * MB, base_url="https://api.openai.com/v1", key="env:OPENAI_API_KEY"),
        Provider("azure", 100_000, 200 * MB, key="env:AZURE_OPENAI_API_KEY"),
        Provider("anthropic", 100_000, 256 * MB, base_url="https://api.anthropic.com", key="env:ANTHROPIC_API_KEY"),
        Provider("cohere", 100_000, 512 * MIB, base_url="https://api.cohere.com", key="env:COHERE_API_KEY"),
        # Gemini documents no maximum of rows.
        Provider("gemini", 100_000, 2000 * MB, base_url=GEMINI_URL, key="env:GEMINI_API_KEY"),
        Provider("sagemaker", 100_000, 1024 * MIB, sends_paths=False),
        Provider("bedrock", 50_000, 1024 * MIB, sends_paths=False),
    )
}
OPENAI_HOST = "api.openai.com"


def default_key(model: ModelSpec) -> str | None:
    """The default reference to the key of a model that has none. Only for the provider's own address."""
    provider = PROVIDERS.get(model.provider or "")
    if model.traits.calls_openai:
        host = None if model.base_url is None else urlsplit(model.base_url).hostname
        return PROVIDERS["openai"].key if host in (None, OPENAI_HOST) else None
    if provider is None or model.connector is not None:
        return None
    return provider.key if model.base_url in (None, provider.base_url) else None
