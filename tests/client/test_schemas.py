"""Schemas of Python classes, as the SDK sends them."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypedDict

import msgspec
import pytest

from batchmill.client.inputs import described
from batchmill.client.schema_classes import check_models, models_of
from batchmill.errors import InvalidInput
from batchmill.types import OutputSchema
from batchmill.wire.native import ModelInfo, NewJob
from batchmill.wire.schemas.class_schemas import has_validators, schema_of
from batchmill.wire.schemas.output_schema import names_of
from batchmill.wire.schemas.schema_validation import check_schema


class Part(msgspec.Struct):
    word: str


class Struct(msgspec.Struct):
    label: Literal["good", "bad"]
    parts: list[Part]


@dataclasses.dataclass
class Data:
    label: str
    score: float


class Typed(TypedDict):
    label: str
    score: float


class Node(msgspec.Struct):
    label: str
    child: Node | None


class Pydantic:
    """What the SDK uses of a pydantic model."""

    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "properties": {"label": {"type": "string"}}, "required": ["label"]}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (Struct, ("label", "parts")),
        (Data, ("label", "score")),
        (Typed, ("label", "score")),
        (Node, ("label", "child")),
        (Pydantic, ("label",)),
        ("label: good|bad, score: float", ("label", "score")),
        ({"type": "object", "properties": {"a": {}}}, ("a",)),
    ],
)
def test_a_class_is_a_schema(source, names):
    """Its fields become the columns, and what it refers to is in the schema."""
    job = described(NewJob, ["file-1"], {"model": "m", "schema": source})
    document = msgspec.json.encode(job.schema).decode()
    assert names_of(OutputSchema(document)) == names
    check_schema(OutputSchema(document))


@pytest.mark.parametrize("source", [7, int, [Struct], Struct(label="good", parts=[]), "label"])
def test_others_are_refused(source):
    """The message says what there is."""
    with pytest.raises(InvalidInput):
        schema_of(source)


@dataclasses.dataclass
class Checked:
    label: str

    def __post_init__(self) -> None:
        assert self.label


class Outer(msgspec.Struct):
    parts: list[Checked]
    later: Node | None = None


def test_which_classes_have_code() -> None:
    """Those with a `__post_init__`, wherever it is in them; models of pydantic with functions."""
    assert [has_validators(each) for each in (Struct, Data, Typed, Node, Checked, Outer)] == [False] * 4 + [True] * 2
    assert not has_validators({"type": "object"}) and not has_validators("a: int")
    order = {"models": ["m"], "schema": Checked, "schema_requirements": "pydantic"}
    assert described(NewJob, ["f"], order, may_have_code=True).schema == schema_of(Checked)
    with pytest.raises(InvalidInput, match="leave one of both out"):
        described(NewJob, ["f"], order | {"validator": "review"}, may_have_code=True)
    with pytest.raises(InvalidInput, match="schema_requirements is for a schema whose class"):
        described(NewJob, ["f"], order | {"schema": Data}, may_have_code=True)
    pydantic = pytest.importorskip("pydantic")

    class Plain(pydantic.BaseModel):
        n: int = pydantic.Field(ge=0)
        words: list[Literal["a", "b"]] = []

    class Inner(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def checked(cls, value: int) -> int:
            return value

    class Whole(pydantic.BaseModel):
        inner: Inner | None = None

    class Late(pydantic.BaseModel):
        n: int

        def model_post_init(self, context: object) -> None:
            """It may raise."""

    assert [has_validators(each) for each in (Plain, Inner, Whole, Late)] == [False, True, True, True]


def test_a_class_beside_functions_is_not_deployed() -> None:
    """Where a server runs functions alone for an order, its schema is refused first; what is not known may answer."""
    models = [ModelInfo("f", "function_process", []), ModelInfo("g", "connector", []), ModelInfo("m", "openai", [])]
    for names in ([], ["m"], ["f", "m"], ["f", "an adapter"]):
        check_models(names, models)
    for names in (["f"], ["f", "g"]):
        with pytest.raises(InvalidInput, match="a schema is for the answers of language models"):
            check_models(names, models)
    assert [models_of(each) for each in ({}, {"model": "m"}, {"models": ["m", "f"]})] == [[], ["m"], ["m", "f"]]
