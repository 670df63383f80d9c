"""The OpenAPI document of a real server: whole, without doubles, and as strict as the server is."""

from __future__ import annotations

import httpx2
import pytest
from fakes.running_server import running_server

OPEN = {
    "getHealth", "getReady", "getOpenApi", "isInferenceLive", "isInferenceReady", "getLinkedAnswer", "fetchLinkedFile",
    "putDataset",
}  # fmt: skip


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("document")) as server:
        return httpx2.get(f"{server.url}/openapi.json").json()


@pytest.fixture(scope="module")
def operations(document):
    return [case for methods in document["paths"].values() for case in methods.values()]


def parts(schema):
    """Every schema within a schema."""
    yield schema
    inner = [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    inner += [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    for each in inner:
        yield from parts(each)


def reachable(document, schema, seen):
    """Every schema that a schema means, references followed."""
    for part in parts(schema):
        yield part
        name = part.get("$ref", "").rpartition("/")[2]
        if name and name not in seen:
            seen.add(name)
            yield from reachable(document, document["components"]["schemas"][name], seen)


def test_operations_have_names_of_their_own(operations):
    """No two operations share a name, and each says what it is for."""
    names = [case["operationId"] for case in operations]
    assert len(names) == len(set(names)) > 40
    assert all(case["summary"] for case in operations)


def test_every_reference_leads_somewhere(document):
    """What the document refers to is in it."""
    known = document["components"]["schemas"]

    def references(value):
        match value:
            case {"$ref": str(name)}:
                yield name
            case dict():
                for each in value.values():
                    yield from references(each)
            case list():
                for each in value:
                    yield from references(each)

    assert {name.rpartition("/")[2] for name in references(document)} <= set(known)


def test_every_operation_declares_its_scope(operations):
    """An operation has a scope and needs a key, or is one of those that are open on purpose."""
    for case in operations:
        is_open = case["operationId"] in OPEN
        assert ("x-batchmill-scope" in case, bool(case["security"])) == (not is_open, not is_open), case["operationId"]


def test_bodies_refuse_what_they_do_not_know(document, operations):
    """Every struct of a JSON body refuses unknown fields: what is accepted is not ignored."""
    loose = []
    for case in operations:
        schema = case.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if schema.get("additionalProperties") is True:
            continue  # a live request: the engine of the model knows its fields
        loose += [
            (case["operationId"], part.get("title"))
            for part in reachable(document, schema, set())
            if "properties" in part and part.get("additionalProperties") is not False
        ]
    assert loose == []


def test_refusals_have_the_envelope_of_their_dialect(document, operations):
    """Every refusal is described, in the form of the dialect that speaks."""
    for case in operations:
        envelope = {"$ref": f"#/components/schemas/{case['tags'][0]}Error"}
        for status, reply in case["responses"].items():
            is_report = status == "503" and case["operationId"] in ("getHealth", "getReady")
            if status >= "400" and status != "416" and not is_report:
                assert reply["content"]["application/json"]["schema"] == envelope, (case["operationId"], status)
        assert {"400", "429", "500", "503"} <= set(case["responses"])
