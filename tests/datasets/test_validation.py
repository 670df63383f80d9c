import json

import pytest
from dataset_rows import CHAT, openai_row

from batchmill.datasets.checking import fan_out
from batchmill.datasets.formats import NAMES_ROWS_MAX
from batchmill.errors import InvalidDataset
from batchmill.wire.rows.forms import COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE, URLS, TableForm

LLM = {"targets": {"m": (0, 0), "base": (0, 0), "upper": (0, 1)}, "urls": [frozenset(URLS)]}
MESSAGES = [{"role": "user", "content": "hi"}]


def row(**fields):
    """A good row with these fields instead; None leaves one out."""
    whole = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": MESSAGES}} | fields
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


def body(**fields):
    return row(body={"messages": MESSAGES} | fields)


ENVELOPES = [
    (b'{"custom_id":"a","url":"/v1/x","body":{}} x', "invalid_json", "not JSON"),
    (b"{'custom_id':'a'}", "invalid_json", "not JSON"),
    (b'{"custom_id":"a","url":"/v1/x","body":{},}', "invalid_json", "not JSON"),
    (b'{"custom_id":"a","url":"/v1/x","body":{"x":NaN}}', "invalid_json", "not JSON"),
    (b'["a"]', "invalid_json", "not an object"),
    (b'{"custom_id":"a","url":"/x","body":{"t":"\xc0\xaf"}}', "invalid_encoding", "not UTF-8"),
    (b"{\0\"\0a\0\xff", "invalid_encoding", "iconv -f UTF-16"),
    (row(body={"x": json.loads("[" * 128 + "]" * 128)}), "nesting_too_deep", "deeper than 128"),
    (b"[" * 2_000_000, "nesting_too_deep", "deeper than 128"),
    (b'{"custom_id":"a","url":"/x","body":' + b'{"a":' * 700_000, "nesting_too_deep", "deeper than 128"),
    (row(custom_id=None), "missing_custom_id", "no custom_id"),
    (b'{"custom_id":null,"url":"/x","body":{}}', "invalid_custom_id", "custom_id is null; it must be a string"),
    (row(custom_id=7), "invalid_custom_id", "custom_id is 7, a number; it must be a string"),
    (row(custom_id=["a"]), "invalid_custom_id", 'custom_id is ["a"], an array; it must be a string'),
    (row(custom_id=""), "invalid_custom_id", "empty"),
    (row(custom_id="a\0b"), "invalid_custom_id", "NUL"),
    (row(custom_id="x" * 513), "invalid_custom_id", "longer than 512"),
    (row(url=None), "invalid_url", "no url"),
    (row(url=["/v1"]), "invalid_url", "an array"),
    (row(url="http://x/v1"), "invalid_url", "must be a path"),
    (row(url="/a b"), "invalid_url", "must be a path"),
    (row(method="GET"), "invalid_method", "only POST"),
    (row(method=True), "invalid_method", "method is true"),
    (row(body=None), "missing_body", "no body"),
    (row(body=[1]), "invalid_body", "an array"),
    (row(body="x"), "invalid_body", "a string"),
    (row(costum_id="a"), "unknown_field", "did you mean 'custom_id'?"),
]  # fmt: skip

BODIES = [
    (row(url="/v1/files"), "invalid_url", "/v1/chat/completions"),
    (body(model="uper"), "unknown_model", "base, m, upper"),
    (body(model=7), "invalid_field", "body.model"),
    (body(messages=None), "invalid_field", "body.messages"),
    (row(body={"prompt": "x"}), "invalid_field", "lacks `messages`"),
    (body(messages=[]), "invalid_field", "body.messages"),
    (body(messages=[{"content": "x"}]), "invalid_field", "body.messages[0] lacks `role`"),
    (body(messages="hi"), "invalid_field", "expected `array`"),
    (body(temperature="0"), "invalid_field", "body.temperature"),
    (body(temperature=-1), "number_out_of_range", "body.temperature"),
    (body(max_tokens="5"), "invalid_field", "body.max_tokens"),
    (body(max_tokens=1.5), "invalid_field", "body.max_tokens"),
    (body(max_tokens=-1), "number_out_of_range", "body.max_tokens"),
    (body(max_completion_tokens=2**70), "number_out_of_range", "body.max_completion_tokens"),
    (body(n=10**9), "number_out_of_range", "body.n"),
    (body(stream="yes"), "invalid_field", "body.stream"),
    (body(stream=True), "streaming_not_supported", "leave it out"),
    *((body(**{name: "x"}), "parameter_not_allowed", f"body.{name}")
      for name in ("api_base", "base_url", "api_key", "headers", "extra_body", "extra_headers")),
    (row(url=COMPLETIONS), "invalid_field", "lacks `prompt`"),
    (row(url=EMBEDDINGS, body={}), "invalid_field", "lacks `input`"),
    (row(url=RESPONSES), "invalid_field", "lacks `input`"),
    (row(url=RERANK, body={"query": "x"}), "invalid_field", "lacks `documents`"),
    (row(url=SCORE, body={"text_1": "x"}), "invalid_field", "lacks `text_1` and `text_2`"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "words"), ENVELOPES)
@pytest.mark.parametrize("order", [{}, LLM], ids=["function", "llm"])
def test_each_flaw_of_a_row_has_its_code(write, sealed, line, code, words, order):
    """A flaw is reported on its own line with a stable code and the offending value, and harms no other row."""
    good = openai_row("good")
    report = sealed(write([good, line, openai_row("good2")]), **order)
    assert [(p.code, p.line) for p in report.problems] == [(code, 2)]
    assert words in report.problems[0].message
    assert len(report.problems[0].message) < 400
    assert report.seal.rows == 3


@pytest.mark.parametrize(("line", "code", "words"), BODIES)
def test_each_flaw_of_a_body_has_its_code(write, sealed, line, code, words):
    """What an engine server or service could not take is found before any row runs."""
    report = sealed(write([line]), **LLM)
    assert [p.code for p in report.problems] == [code]
    assert words in report.problems[0].message


@pytest.mark.parametrize(("line", "code", "words"), BODIES)
def test_a_function_takes_any_body(write, sealed, line, code, words):
    """For a function only the envelope is checked: its body, model and path are its own business."""
    assert sealed(write([line])).problems == []


@pytest.mark.parametrize(
    "line",
    [
        body(model="upper", temperature=0.0, max_tokens=5, n=2, stop=["x"], seed=1, top_p=1, unknown={"x": 1}),
        body(model="", stream=False, temperature=None),
        row(method=None),
        row(url=COMPLETIONS, body={"prompt": [1, 2], "max_tokens": 0}),
        row(url=EMBEDDINGS, body={"input": ["a", "b"]}),
        row(url=RESPONSES, body={"input": "x", "max_output_tokens": 3}),
        row(url=RERANK, body={"query": "x", "documents": ["y"]}),
        row(url=SCORE, body={"text_1": "x", "text_2": ["y"]}),
        row(custom_id="../\n\u202e🙂" + "x" * 500),
        body(user="\u2028" + "\0"),
        body(deep=json.loads("[" * 126 + "]" * 126)),
        body(flat=[[[]]] * 500, text="[" * 1000),
    ],
)
def test_good_rows_pass(write, sealed, line):
    """Rows that the APIs take pass, fields we do not know included."""
    assert sealed(write([line]), **LLM).problems == []


def test_models_are_checked_by_the_urls_of_their_own(write, sealed):
    """With several models, body.model says whose urls and rules count."""
    order = {
        "targets": {"chat": (0, 0), "fun": (1, 1)},
        "urls": [frozenset([CHAT]), None],
    }
    lines = [
        row(custom_id="1", body={"model": "fun", "x": 1}, url="/any"),
        row(custom_id="2", body={"model": "chat", "x": 1}),
        row(custom_id="3", body={"model": "chat", "messages": MESSAGES}, url="/any"),
        row(custom_id="4", body={"model": "other"}),
    ]
    assert [p.code for p in sealed(write(lines), **order).problems] == ["invalid_field", "invalid_url", "unknown_model"]


def test_a_depth_of_exactly_the_limit_passes(write, sealed):
    """128 levels pass, brackets in strings count for nothing, and 129 levels do not pass."""
    levels = [b'{"t":"' + b"[" * 500 + b'","a":' + b"[" * n + b"]" * n + b"}" for n in (127, 128)]
    report = sealed(write(levels))
    assert [(p.code, p.line) for p in report.problems] == [("nesting_too_deep", 2)]


def test_tables(write, sealed):
    """Rows of a table need the prompt's columns, may not use the result's names, and are objects."""
    lines = [b'{"a":1,"b":2}', b'{"b":2}', b'{"a":1,"error":2}', b"[1]", b'{"a":1,"folded_from":1}', b'{"a":{}}']
    form = TableForm(prompt="{a}?")
    report = sealed(write(lines), form=form)
    assert [(p.code, p.line) for p in report.problems] == [
        ("missing_column", 2),
        ("column_conflict", 3),
        ("invalid_json", 4),
        ("column_conflict", 5),
    ]
    assert report.seal.columns == ["a", "b"]


def test_table_of_unlike_rows(write, sealed):
    """Rows of thousands of shapes are all checked."""
    lines = [b'{"a":1,"c%d":2}' % n for n in range(3000)] + [b'{"c":1}']
    report = sealed(write(lines), form=TableForm(prompt="{a}"))
    assert [(p.code, p.line) for p in report.problems] == [("missing_column", 3001)]


@pytest.mark.parametrize("rows", [1, NAMES_ROWS_MAX])
def test_a_column_that_no_row_has_is_told_once(write, sealed, rows):
    """A name in the prompt that none of the first rows has refuses the dataset; one that a later row has does not."""
    form = TableForm(prompt="{revue}")
    with pytest.raises(
        InvalidDataset, match="needs a column 'revue'; the columns are review, n; did you mean 'review'"
    ) as caught:
        sealed(write([b"nope", *[b'{"review":1}'] * (rows - 1), b'{"review":1,"n":2}']), form=form)
    assert caught.value.code == "missing_column"


@pytest.mark.parametrize(("before", "is_seen"), [(NAMES_ROWS_MAX - 1, True), (NAMES_ROWS_MAX, False)])
def test_a_column_that_only_some_rows_have(write, sealed, before, is_seen):
    """Rows that lack a column which another of the first rows has are refused one by one."""
    path = write([*[b'{"a":1}'] * before, b'{"b":1}'])
    if not is_seen:
        with pytest.raises(InvalidDataset, match="needs a column 'b'"):
            sealed(path, form=TableForm(prompt="{b}"))
        return
    report = sealed(path, form=TableForm(prompt="{b}"))
    assert (report.rejected, report.problems[0].code) == (before, "missing_column")


def test_a_table_that_cannot_be_read_is_told_row_by_row(write, sealed):
    """Where no row can be read, it is the rows that are wrong and not the prompt."""
    report = sealed(write([b"nope", b"no"]), spec={"format": "jsonl"}, form=TableForm(prompt="{b}"))
    assert [problem.code for problem in report.problems] == ["invalid_json"] * 2


@pytest.mark.parametrize("processes", [1, 2])
def test_columns_of_a_table_to_be_are_counted(write, sealed, monkeypatch, processes):
    """Rows of as many columns as a table may have are sealed, and one column more refuses the dataset."""
    monkeypatch.setattr(fan_out, "INLINE_BYTES_MAX", 0)
    path = write([b'{"a":1,"c%d":2}' % n for n in range(2000)])
    assert sealed(path, columns_max=2001, processes=processes).problems_total == 0
    assert sealed(path, processes=processes).problems_total == 0
    with pytest.raises(InvalidDataset, match="more than 2000 different columns") as caught:
        sealed(path, columns_max=2000, processes=processes)
    assert caught.value.code == "too_many_columns"


def test_what_a_table_becomes_must_be_a_request(write, sealed):
    """Parameters no model takes are refused once, not on every row."""
    with pytest.raises(InvalidDataset, match="body.max_tokens") as caught:
        sealed(write([b'{"a":1}']), form=TableForm(prompt="{a}", params={"max_tokens": "x"}), **LLM)
    assert caught.value.code == "invalid_field"


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_prompt_without_a_column(write, sealed, name):
    """A prompt that makes the same request of every row is refused once, with the columns there are, or allowed."""
    path = write(b"id,review\n1,good\n" if name == "t.csv" else [b'{"id":1,"review":"good"}'], name)
    with pytest.raises(
        InvalidDataset, match=r"names no column.*the columns are id, review: write \{review\}"
    ) as caught:
        sealed(path, form=TableForm(prompt="Is the review positive? {{review}}", system="S"), **LLM)
    assert caught.value.code == "constant_prompt"
    for form in (
        TableForm(prompt="Hello", may_be_constant=True),
        TableForm(prompt="Hello", system="{id}"),
        TableForm(prompt="{id}"),
    ):
        assert sealed(path, form=form, **LLM).rejected == 0


def test_columns_name_models_and_adapters(write, sealed):
    """A cell names the model or adapter of its row, which are checked as in a request; an empty one is the default."""
    cells = [
        ("base", ""), ("", ""), ("", "upper"), ("base", "upper"), ("m", None), ("nope", ""), ("", "upperr"),
        ("m", "other"), ("chat", ""),
    ]  # fmt: skip
    lines = [json.dumps({"q": "a", "model": name, "lora": adapter}).encode() for name, adapter in cells]
    form = TableForm(prompt="{q}", model_column="model", adapter_column="lora", url="/v1/completions")
    models = {
        "targets": {"m": (0, 0), "base": (0, 0), "upper": (0, 1), "other": (1, 2), "chat": (1, 3)}, "bases": [0, 3],
        "urls": [frozenset(URLS), frozenset(["/v1/chat/completions"])], "keys": True,
    }  # fmt: skip
    report = sealed(write(lines), form=form, **models)
    assert [(problem.row, problem.code) for problem in report.problems] == [
        (5, "unknown_model"), (6, "unknown_model"), (7, "invalid_url"), (8, "invalid_url"),
    ]  # fmt: skip
    models["urls"] = [frozenset(URLS)] * 2
    (wrong,) = sealed(write(lines[:5] + lines[7:]), form=form, **models).problems
    assert (wrong.row, wrong.code) == (5, "wrong_adapter")
    assert wrong.message == "'other' is no adapter of 'm', which the row names as its model"
    named = [json.dumps({"q": "a", "model": "", "lora": name}).encode() for name in ("upper", "chat", "base", "")]
    problems = sealed(write(named), form=form, **models).problems
    assert [(problem.row, problem.code) for problem in problems] == [(1, "wrong_adapter"), (2, "wrong_adapter")]
    text = "the column 'lora' names 'chat', which is a model and no adapter; this job has other, upper"
    assert problems[0].message == text


def test_a_column_of_models_that_is_missing(write, sealed):
    """It is refused once, and a prompt that names no column stays one."""
    with pytest.raises(InvalidDataset, match="choice of a model needs a column 'modell'.*did you mean 'model'"):
        sealed(write([b'{"q":1,"model":"m"}']), form=TableForm(prompt="{q}", model_column="modell"), **LLM)
    with pytest.raises(InvalidDataset, match="names no column"):
        sealed(write([b'{"q":1,"model":"m"}']), form=TableForm(prompt="hi", model_column="model"), **LLM)


def test_a_prompt_does_not_fit_requests(write, sealed):
    """OpenAI rows with a table's form are refused: the prompt would be ignored."""
    with pytest.raises(InvalidDataset, match="does not fit") as caught:
        sealed(write([openai_row("a")]), form=TableForm(prompt="{a}"))
    assert caught.value.code == "form_mismatch"


def test_a_table_needs_a_prompt(write, sealed):
    """A table for a language model, and no prompt, is refused once and not on every row."""
    with pytest.raises(InvalidDataset, match="--prompt") as caught:
        sealed(write([b'{"a":1}']), **LLM)
    assert caught.value.code == "missing_prompt"
