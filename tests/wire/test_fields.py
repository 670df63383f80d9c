"""Which body fields an engine server knows."""

from batchmill.wire.fields import KNOWN_FIELDS, NO_EFFECT, fields_of_openapi, refusal, unknown_fields
from batchmill.wire.rows.forms import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE, URLS


def test_every_url_has_its_fields():
    """No URL that a row may name is without a list, and every list has what its calls cannot do without."""
    assert set(KNOWN_FIELDS) == {*URLS, CLASSIFY}
    needed = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input", RESPONSES: "input", RERANK: "query"}
    assert all(name in KNOWN_FIELDS[url] for url, name in {**needed, SCORE: "text_1"}.items())
    assert all("model" in fields and fields >= NO_EFFECT for fields in KNOWN_FIELDS.values())


def test_unknown_fields_are_named_in_order():
    """The fields that would be ignored are found, known ones and those without effect pass."""
    names = dict.fromkeys(["model", "messages", "temprature", "top_k", "user", "zzz"], b"1")
    assert unknown_fields(CHAT, names) == ["temprature", "zzz"]
    assert unknown_fields("/v1/other", names) == []


def test_what_openai_does_anyway_may_be_asked_for():
    """Fields of OpenAI's that say what is so without them pass; with another value they are refused by name."""
    said = {"model": b'"m"', "modalities": b'[ "text" ]', "verbosity": b'"medium"', "audio": b"null", "store": b"true"}
    assert unknown_fields(CHAT, said) == []
    more = said | {"modalities": b'["text","audio"]', "verbosity": b'"low"', "audio": b'{"voice": "alloy"}'}
    assert unknown_fields(CHAT, more) == ["modalities", "verbosity", "audio"]
    text = refusal(CHAT, ["modalities", "verbosity"])
    assert "'modalities' (which may be left out, or null or [\"text\"])" in text and '"medium"' in text
    assert unknown_fields(CHAT, {"functions": b"[" * 5000}) == ["functions"]


def test_a_refusal_names_the_field_the_url_and_the_nearest():
    """A person reads which field, for which URL, and what it may have been meant to be."""
    text = refusal(CHAT, ["temprature", "qqqqqq"])
    assert "'temprature' (did you mean 'temperature'?)" in text
    assert "'qqqqqq'" in text
    assert CHAT in text


def test_a_refusal_of_many_fields_is_short():
    """Eight fields are named, the rest are counted."""
    assert "and 2 more" in refusal(CHAT, [f"f{i}" for i in range(10)])
    assert "more" not in refusal(CHAT, [f"f{i}" for i in range(8)])


def test_a_servers_own_description_is_read_through_references_and_alternatives():
    """The fields of a URL are those of all the schemas that its body may have; a URL without a schema is left out."""
    chat = {"$ref": "#/components/schemas/Chat"}
    embed = {"anyOf": [{"$ref": "#/components/schemas/A"}, {"properties": {"messages": {}}}]}
    document = {
        "paths": {
            CHAT: {"post": {"requestBody": {"content": {"application/json": {"schema": chat}}}}},
            EMBEDDINGS: {"post": {"requestBody": {"content": {"application/json": {"schema": embed}}}}},
            SCORE: {"post": {"responses": {}}},
            "/v1/models": {"get": {}},
        },
        "components": {
            "schemas": {"Chat": {"properties": {"messages": {}, "new": {}}}, "A": {"properties": {"in": {}}}}
        },
    }
    assert fields_of_openapi(document) == {
        CHAT: {"messages", "new"} | NO_EFFECT,
        EMBEDDINGS: {"in", "messages"} | NO_EFFECT,
    }


def test_a_description_that_refers_to_itself_ends():
    """A schema that names itself is read to a bounded depth."""
    schema = {"$ref": "#/components/schemas/Loop"}
    document = {
        "paths": {CHAT: {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}},
        "components": {"schemas": {"Loop": {"properties": {"a": {}}, "allOf": [schema]}}},
    }
    assert fields_of_openapi(document) == {CHAT: {"a"} | NO_EFFECT}
