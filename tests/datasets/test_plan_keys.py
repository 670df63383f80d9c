import json
from array import array

import pytest
from dataset_rows import CHAT, openai_row
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.datasets import layout
from batchmill.datasets.checking import inspection
from batchmill.types import Request
from batchmill.wire.rows.forms import COMPLETIONS, EMBEDDINGS, RESPONSES, URLS, TableForm

LLM = {"targets": {"m": (0, 0), "src/m": (0, 0), "upper": (0, 1)}, "urls": [frozenset(URLS)], "keys": True}


def column(home, name, code):
    found = array(code)
    found.frombytes((home / name).read_bytes())
    return found.tolist()


def folds(home):
    data = (home / layout.FOLD).read_bytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def keys(fold="deterministic", url=CHAT, target=0, **body):
    return inspection.of_request(Request(url, json.dumps(body).encode()), target, fold)


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def test_columns_of_a_dataset(write, sealed, home):
    """Every row has one entry in every column; a refused row has zeros."""
    lines = [
        openai_row("1", chat("a", model="upper", temperature=0)),
        b"nope",
        openai_row("2", chat("a", model="src/m", temperature=0, max_tokens=10)),
        openai_row("3", chat("a", max_tokens=10, temperature=0)),
    ]
    sealed(write(lines), fold="deterministic", **LLM)
    assert column(home, layout.TARGET, "H") == [1, 0, 0, 0]
    one, none, two, three = folds(home)
    assert none == bytes(16)
    assert two == three != one
    prefixes, costs = column(home, layout.PREFIX, "Q"), column(home, layout.COST, "I")
    assert prefixes[0] == prefixes[2] == prefixes[3] != prefixes[1] == 0
    text = json.dumps(chat("a")["messages"])
    assert costs == [len(text) // 4 + 256, 0, len(text) // 4 + 10, len(text) // 4 + 10]


def test_without_keys_there_are_no_columns(write, sealed, home):
    """A job that runs in file order pays for no columns."""
    sealed(write([openai_row("a")]))
    assert not any((home / name).exists() for name in (layout.TARGET, layout.PREFIX, layout.COST, layout.FOLD))


@settings(deadline=None)
@given(st.text(min_size=600), st.text(), st.text())
def test_prefixes_sort_together(shared, one, two):
    """Rows that share the first n bytes share the key's levels up to n."""
    texts = [(shared + tail).encode() for tail in (one, two)]
    common = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))  # noqa: B905
    levels = sum(level <= common for level in inspection.LEVELS)
    shift = inspection.LEVEL_BITS * (len(inspection.LEVELS) - levels)
    assert inspection.prefix_of(texts[0]) >> shift == inspection.prefix_of(texts[1]) >> shift
    assert inspection.prefix_of(texts[0]) < 1 << 60


def test_tools_come_before_messages():
    """Tools lead the prompt, wherever they stand in the body."""
    tools = [{"type": "function", "function": {"name": "f" * 200}}]
    first = json.dumps({"tools": tools, **chat("a")}).encode()
    last = json.dumps({**chat("a"), "tools": tools}).encode()
    assert inspection.of_request(Request(CHAT, first), 0, "none") == inspection.of_request(
        Request(CHAT, last), 0, "none"
    )


@pytest.mark.parametrize(
    ("url", "body", "folded"),
    [
        (CHAT, chat("a", temperature=0), True),
        (CHAT, chat("a", temperature=0.0, n=3), True),
        (CHAT, chat("a"), False),
        (CHAT, chat("a", temperature=0.1), False),
        (CHAT, chat("a", temperature=0, stream=True), False),
        (COMPLETIONS, {"prompt": "a", "temperature": 0}, True),
        (EMBEDDINGS, {"input": "a"}, True),
        (RESPONSES, {"input": "a", "temperature": 0}, True),
        (RESPONSES, {"input": "a", "temperature": 0, "conversation": "conv_1"}, False),
    ],
)
def test_who_may_share_an_answer(url, body, folded):
    """By default only rows whose answer is sure to be the same share it; `all` adds the rest but streams."""
    assert (keys(url=url, **body).fold != inspection.NO_FOLD) == folded
    assert (keys("all", url=url, **body).fold != inspection.NO_FOLD) == ("stream" not in body)
    assert keys("none", url=url, **body).fold == inspection.NO_FOLD


def test_equal_requests():
    """Order of fields and the model's other name do not matter; every digit, target and path does."""

    def fold(text, url=CHAT, target=0):
        return inspection.fold_of(url, inspection.canonical_of(text, without="model"), target)

    assert fold(b'{"a":1,"b":{"c":2,"d":3},"model":"x"}') == fold(b'{"b":{"d":3,"c":2}, "model":"y", "a":1}')
    texts = [b'{"a":1}', b'{"a":1.0}', b'{"a":"1"}', b'{"a":18446744073709551617}', b'{"a":18446744073709551618}']
    found = {fold(text) for text in texts} | {fold(texts[0], target=1), fold(texts[0], COMPLETIONS)}
    assert len(found) == len(texts) + 2
    assert fold(b'{"a":' + b"9" * 9000 + b"}") == inspection.NO_FOLD


def test_costs():
    """A row costs its prompt and what it may answer, for each choice; vectors answer in no tokens."""
    text = len(json.dumps(chat("a")["messages"])) // 4
    assert keys(**chat("a", max_tokens=5, n=3)).cost == text + 15
    assert keys(**chat("a", max_completion_tokens=7, max_tokens=5)).cost == text + 7
    assert keys(**chat("a", max_tokens=2**31 - 1, n=16_384)).cost == inspection.COST_MAX
    assert keys(url=EMBEDDINGS, input="a" * 398).cost == 100
    assert keys(url=EMBEDDINGS, input="a" * 398, n="odd").cost > 100


def test_functions(write, sealed, home):
    """Rows of a function share answers only when asked to, whatever field of theirs is called model."""
    lines = [
        openai_row(str(n), {"x": x, "model": model}) for n, (x, model) in enumerate([(1, "a"), (1, "a"), (1, "b")])
    ]
    sealed(write(lines), keys=True, fold="all")
    one, two, three = folds(home)
    assert one == two != three
    sealed(write(lines), keys=True, fold="deterministic")
    assert set(folds(home)) == {bytes(16)}


def test_tables(write, sealed, home):
    """Rows of a table are keyed by the request they become, or by their columns where they become none."""
    lines = [b'{"a":"x","id":1}', b'{"a":"x","id":2}', b'{"a":"y","id":3}']
    form = TableForm(prompt="{a}", params={"temperature": 0, "model": "upper"})
    sealed(write(lines), form=form, fold="deterministic", **LLM)
    one, two, three = folds(home)
    assert one == two != three
    assert column(home, layout.TARGET, "H") == [1, 1, 1]
    sealed(write([*lines, lines[0]]), keys=True, fold="all")
    assert len(set(folds(home))) == 3
