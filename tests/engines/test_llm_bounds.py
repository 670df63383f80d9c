"""What a request may ask of an engine server: every field and every schema is bounded before it is sent."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from contract.engine_suite import ListSink, OpenFeed, answer_to, chat_request, chat_row
from llm_support import FakeVllm

from batchmill.engines.llm import request_bounds
from batchmill.engines.llm.engine import LlmEngine
from batchmill.engines.llm.request_bounds import RequestLimits, check_grammar, check_pattern
from batchmill.errors import InvalidInput, InvalidRow
from batchmill.types import Limits
from batchmill.wire.json_bytes import split_object
from batchmill.wire.rows.forms import CHAT, COMPLETIONS

MANY = 10**9


def shaped(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tree(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def doubling(levels: int) -> Any:
    """A schema whose references come to 3 ** levels parts."""
    definitions = {f"d{n}": {"prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(levels)}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def refusal(url: str = CHAT, limits: Limits = Limits(), **fields: Any) -> InvalidRow | None:
    try:
        RequestLimits(limits).check(url, split_object(json.dumps(fields).encode()))
    except InvalidRow as error:
        return error
    return None


TAG = {"structures": [{"begin": "<a>", "schema": {"minItems": MANY}, "end": "</a>"}], "triggers": ["<a>"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"minItems": MANY}}}}}
NODE = {"properties": {"children": {"type": "array", "maxItems": 50, "items": {"$ref": "#/$defs/node"}}}}
GRAMMAR = 'root ::= "[" item{1,20} "]"\nitem ::= [a-z]{1,20} | "(" item ")"'
# What is refused, and what its message names: the keyword, its value, the limit.
TOO_LARGE: list[tuple[dict[str, Any], list[str]]] = [
    (shaped({"minItems": MANY}), ["schema.minItems is 1,000,000,000", "100,000", "limits.schema_repetitions_max"]),
    (shaped({"minItems": 1e9}), ["minItems is 1,000,000,000.0"]),
    (shaped({"x-nobody-knows": MANY}), ["x-nobody-knows"]),
    (shaped({"properties": {"default": {"minItems": MANY}}}), ["properties.default.minItems"]),
    (shaped({"properties": {"enum": {"maxProperties": MANY}}}), ["enum.maxProperties"]),
    (shaped({"maxLength": MANY}), ["maxLength"]),
    (shaped({"minimum": 10**400}), ["minimum", "2**63"]),
    (shaped({"maxItems": 1000, "items": {"maxItems": 1000, "items": {"maxItems": 10}}}), ["1,000,000 is the most"]),
    (shaped(doubling(20)), ["references"]),
    (shaped(tree(70)), ["deeper than 64"]),
    (shaped({"enum": list(range(20_000))}), ["schema_nodes_max"]),
    (shaped({"properties": {f"p{n}": {} for n in range(1_001)}}), ["1,001 names"]),
    (shaped({"description": "x" * 300_000}), ["schema_bytes_max is 262,144"]),
    (shaped({"pattern": "[a-z]{1,1000000000}"}), ["pattern", "10,000 is the most"]),
    (shaped({"pattern": "((a{1,100}){1,100}){1,100}"}), ["repetitions in repetitions"]),
    (shaped({"patternProperties": {"a{99999}": {}}}), ["patternProperties"]),
    ({"structured_outputs": {"json": {"minItems": MANY}}}, ["structured_outputs.json.minItems"]),
    ({"structured_outputs": {"json": json.dumps({"minItems": MANY})}}, ["structured_outputs.json.minItems"]),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, ["structured_outputs.regex"]),
    ({"structured_outputs": {"regex": "(" * 100 + "a" + ")" * 100}}, ["groups deeper than 64"]),
    ({"structured_outputs": {"choice": ["x"] * 20_000}}, ["schema_nodes_max"]),
    ({"structured_outputs": {"grammar": 'root ::= a{1000}\na ::= "x"{1000}'}}, ["'root'", "1,000,000 times"]),
    ({"structured_outputs": {"grammar": 'start: a~1..1000\na: "x"~1000'}}, ["'start'"]),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, ["structures[0].schema.minItems"]),
    ({"response_format": {"type": "structural_tag", **TAG}}, ["structures[0].schema.minItems"]),
    ({"tools": [TOOL]}, ["tools[0].function.parameters.properties.a.minItems"]),
    ({"text": {"format": {"type": "json_schema", "schema": {"minItems": MANY}}}}, ["text.format.schema.minItems"]),
    ({"guided_json": {"minItems": MANY}}, ["guided_json.minItems"]),
    ({"guided_regex": "a{1000000}"}, ["guided_regex"]),
]
FITS: list[dict[str, Any]] = [
    shaped({"type": "array", "minItems": 1, "maxItems": 100_000, "items": {"type": "string", "maxLength": 100_000}}),
    shaped({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}),
    shaped({"properties": {"maxItems": {"type": "integer", "minimum": -(2**53), "maximum": 2**53}}}),
    shaped({"properties": {f"p{n}": {"type": "string", "description": "a name"} for n in range(1_000)}}),
    shaped({"pattern": r"^\{[a-z\]]{1,64}@(?:[a-z0-9-]{1,63}\.){1,8}[a-z]{2,}\}$"}),
    shaped({"enum": ["a" * 50] * 900, "default": {"minItems": MANY}}),
    {"structured_outputs": {"grammar": GRAMMAR}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
    },
    {"response_format": {"type": "json_object"}},
    {"temperature": 0.7000000000000001, "top_k": -1, "seed": 2**63 - 1, "max_tokens": 100_000, "n": 128},
    {"stop": ["10000000000000000000", "\n"], "logit_bias": {"50256": -100}, "cache_salt": "1e999"},
    {"chat_template": None, "chat_template_kwargs": {"enable_thinking": False}, "user": "x" * 10_000},
    {"messages": [{"role": "user", "content": "x" * 100_000}], "documents": [{"text": "y" * 100_000}]},
]
REFUSED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"n": 129}, "number_out_of_range", ["body.n is 129", "128"]),
    ({"top_k": 10**30}, "number_out_of_range", ["top_k"]),
    ({"top_k": str(10**30)}, "number_out_of_range", ["top_k"]),
    ({"thinking_token_budget": 2**40}, "number_out_of_range", ["thinking_token_budget"]),
    ({"length_penalty": 1e300}, "number_out_of_range", ["length_penalty"]),
    ({"length_penalty": "nan"}, "number_out_of_range", ["length_penalty is nan"]),
    ({"priority": -5}, "number_out_of_range", ["priority"]),
    ({"repetition_detection": {"max_pattern_size": 10**12}}, "number_out_of_range", ["repetition_detection"]),
    ({"logit_bias": {str(n): 1 for n in range(1_025)}}, "parameter_too_large", ["1,024"]),
    ({"stop": ["x" * 70_000]}, "parameter_too_large", ["stop", "65,536"]),
    ({"cache_salt": "x" * 5_000}, "parameter_too_large", ["cache_salt", "4,096"]),
    ({"chat_template": "{{ x }}"}, "parameter_not_allowed", ["chat_template"]),
    ({"chat_template_kwargs": {"max_length": 1}}, "parameter_not_allowed", ["max_length"]),
    ({"mm_processor_kwargs": {"a": 1}}, "parameter_not_allowed", ["mm_processor_kwargs"]),
    ({"prompt_embeds": "gAR9"}, "parameter_not_allowed", ["prompt_embeds"]),
    ({"kv_transfer_params": {"a": 1}}, "parameter_not_allowed", ["kv_transfer_params"]),
    ({"vllm_xargs": {"a": 1}}, "parameter_not_allowed", ["vllm_xargs"]),
    ({"request_id": "one"}, "parameter_not_allowed", ["request_id"]),
    (shaped({"$ref": "http://host/schema"}), "invalid_field", ["http://host/schema", "#"]),
    ({"structured_outputs": {"grammar": 'start: a\na: %json {"minItems": 1000000000}'}}, "parameter_not_allowed",
     ["%json"]),
]  # fmt: skip


def test_what_shapes_an_answer_is_bounded():
    """A schema, pattern, grammar or tool that repeats, nests or refers too much is refused by keyword and limit."""
    for fields, words in TOO_LARGE:
        error = refusal(**fields)
        assert error is not None, fields
        assert error.code == "structured_output_too_large", error
        assert [word for word in words if word not in error.message] == [], error


def test_what_people_ask_for_fits():
    """Large and recursive schemas, odd texts and long prompts pass."""
    for fields in FITS:
        assert refusal(**fields) is None, fields


def test_fields_are_bounded():
    """Numbers fit the engine's own, lists are short, and what only engines say to each other is refused by name."""
    for fields, code, words in REFUSED:
        error = refusal(**fields)
        assert error is not None, fields
        assert error.code == code, error
        assert [word for word in words if word not in error.message] == [], error
    assert refusal(COMPLETIONS, prompt=["a"] * 8, n=128) is None
    assert "1,024" in str(refusal(COMPLETIONS, prompt=["a"] * 9, n=128))


def test_the_limits_are_the_models():
    """Each limit holds at its value and not beyond it, and `limits` of a model moves it."""
    limits = Limits(schema_repetitions_max=5, schema_nodes_max=12, schema_bytes_max=150)
    assert refusal(limits=limits, **shaped({"maxItems": 5})) is None
    for schema in ({"maxItems": 6}, {"enum": [1] * 12}, {"title": "x" * 150}):
        assert refusal(limits=limits, **shaped(schema)) is not None


def test_patterns_and_grammars_are_counted_as_written():
    """Escapes, classes and braces that are not counts repeat nothing."""
    patterns = {r"\{9999999\}": 9, "[{]{3}": 3, "a{,}": 4, r"[\]{9}]": 1, "(ab|c){4}": 12, "x{2}{3}": 6, "}{": 2}
    assert {text: check_pattern(text, "p") for text in patterns} == patterns
    assert check_grammar('root ::= "{9999999}" # {9999999}\n', "g") > 0
    with pytest.raises(InvalidRow):
        check_pattern("a" * 20_000, "p")
    with pytest.raises(InvalidRow):
        check_grammar('root ::= "a"\n' * 6_000, "g")


def test_different_lengths_of_texts_are_summed():
    """An engine builds each of them, which takes its time; one that many texts share, it builds once."""
    many = {f"p{n}": {"maxLength": 100_000 - n} for n in range(11)}
    assert "other lengths" in str(refusal(**shaped({"properties": many})))
    shared = {f"p{n}": {"minLength": 1, "maxLength": 65_535} for n in range(500)}
    assert refusal(**shaped({"properties": shared})) is None


def test_reading_a_pattern_or_grammar_takes_time_in_proportion():
    """What opens sets, counts, texts and attributes without end is read once: else one of these takes half a minute."""
    for text in ("[" * 16_000, "{" + " " * 16_000, "\\p{" * 5_000, "[]" + "[" * 16_000):
        with contextlib.suppress(InvalidRow):
            check_pattern(text, "p")
    for text in (
        "[\\]" * 20_000,
        '\\"' * 30_000,
        "a{" * 30_000,
        ("{" + " " * 7_000) * 9,
        "/\\" * 30_000,
        "a[" * 30_000,
    ):
        with contextlib.suppress(InvalidRow):
            check_grammar("a: " + text, "g")


def test_repetitions_hide_behind_no_spelling_of_a_rule():
    """Parts that may be absent, priorities and attributes of rules, and many rules that each repeat, are counted."""
    hidden = (
        'start: [b~200 "x"]\nb: ("a"~200)',
        'start: B~200\nB.5: "x"~200',
        'start: b~200\nb[stop="]", capture]: "x"~200',
        "\n".join(f'r{n} ::= "x"{{9000}}' for n in range(100)),
    )
    for text in hidden:
        with pytest.raises(InvalidRow) as refused:
            check_grammar(text, "g")
        assert refused.value.code == "structured_output_too_large", text
    for text in (
        'root ::= [^"\\\\] [a-z]{1,100} "\\"" ["] b\nb ::= [\\]x]{10}',
        'start: a | "b"\na: /[a-z"]+/ ["x" a]',
    ):
        assert check_grammar(text, "g") == len(text)


async def test_nothing_of_it_reaches_the_engine(tmp_path):
    """Live and in rows alike it is refused here; rows beside it are answered, and the engine never hears of it."""
    fake = FakeVllm(tmp_path)
    engine = LlmEngine(fake.model(), fake.home, env=fake.env)
    await engine.start()
    try:
        poison = shaped({"type": "array", "minItems": MANY})
        with pytest.raises(InvalidInput) as refused:
            await answer_to(engine, chat_request("live", **poison))
        sink = ListSink()
        rows = [chat_row(0, "row", **poison), chat_row(1, "fine")]
        await engine.run(OpenFeed(sink, rows, ended=True), sink)
    finally:
        await engine.stop()
    errors = {outcome.row.number: outcome.error and outcome.error.code for outcome in sink.outcomes}
    assert (refused.value.code, errors) == ("structured_output_too_large", {0: refused.value.code, 1: None})
    assert [call["body"]["messages"][0]["content"] for call in fake.calls()] == ["fine"]


@pytest.mark.parametrize(
    ("text", "rules"), [("a{:b", []), ('a["x:b', []), ("a{x}: b", ["a{x}:"]), ("a: b ~3 .. c", ["a:"])]
)
def test_what_looks_like_a_rule(text, rules):
    """A template that is not closed is none, in every version of Python."""
    for syntax in request_bounds._SYNTAXES:
        assert [match[0] for match in syntax.finditer(text) if match.lastgroup == "rule"] == rules
