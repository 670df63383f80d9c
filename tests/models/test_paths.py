"""Which paths a model answers, and which the configuration may add."""

from __future__ import annotations

import pytest

from batchmill.errors import InvalidInput
from batchmill.models.paths import PATH_CHARS_MAX, PATHS_MAX, answers, check_paths, paths_of
from batchmill.types import ModelSpec
from batchmill.wire.rows.forms import URLS


def spec(engine: str, **fields: object) -> ModelSpec:
    return ModelSpec(**{"name": "m", "engine": engine, "source": "s", **fields})


def test_each_engine_has_its_paths():
    """Language models answer the forms of rows, services moderations too, providers their own; functions any."""
    http, llm = spec("http", paths=["/v1/x"]), spec("llm")
    assert paths_of(http) == {*URLS, "/v1/moderations", "/v1/x"}
    assert paths_of(llm) == set(URLS)
    assert paths_of(spec("provider_batch", provider="openai")) == {*URLS, "/v1/moderations"}
    assert paths_of(spec("provider_batch", provider="anthropic")) == {"/v1/messages", "/v1/chat/completions"}
    assert paths_of(spec("provider_batch", provider="gemini")) == {"/v1/chat/completions", "/v1/embeddings"}
    assert paths_of(spec("routes", routes=[http, llm])) == paths_of(http)
    for free in (spec("function"), spec("connector"), spec("provider_batch", provider="bedrock")):
        assert paths_of(free) is None and answers(free, "/v1/any") and not answers(free, "/v2/any")
    assert answers(http, "/v1/x") and not answers(http, "/v1/X") and not answers(llm, "/v1/x")


@pytest.mark.parametrize("has_admin_paths", [False, True])
def test_what_the_configuration_may_add(has_admin_paths):
    """Plain paths below /v1, each in full: none that is read in two ways, and none that a server has itself."""
    check_paths(["/v1/messages"] * PATHS_MAX, has_admin_paths=has_admin_paths)
    refused = (
        "", "/v1", "/v1/", "/v2/x", "v1/x", "/v1//x", "/v1/../x", "/v1/.x", "/v1/x/", "/v1/%78", "/v1/x?y=1", "/v1/x#y",
        "/v1/x;y", "/v1/x\\y", "/v1/@x", "/v1/*", "/v1/{id}", "/v1/\u00e9", "/v1/x\n", "https://a.b/v1/x",
        "/v1/batches", "/v1/files/x", "/v1/" + "x" * PATH_CHARS_MAX,
    )  # fmt: skip
    for path in refused:
        with pytest.raises(InvalidInput, match="paths: "):
            check_paths([path], has_admin_paths=has_admin_paths)
    with pytest.raises(InvalidInput, match="65 entries"):
        check_paths(["/v1/messages"] * (PATHS_MAX + 1), has_admin_paths=has_admin_paths)


def test_an_engine_is_not_changed_through_a_path():
    """Of vLLM's own paths those can be added that run a model, and none that loads adapters or stops it."""
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/responses/x/cancel"):
        with pytest.raises(InvalidInput, match="does not run a model of vLLM"):
            check_paths([path], has_admin_paths=True)
