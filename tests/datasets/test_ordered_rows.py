"""What a server's order asks of rows: that they name a model, the one path, and that they are not too many."""

from __future__ import annotations

import json
import random

import pytest

from batchmill.datasets import layout
from batchmill.datasets.checking.inspection import Inspector, KeyColumns
from batchmill.datasets.orders import SealOrder
from batchmill.datasets.validation import OpenAIRules
from batchmill.errors import InvalidDataset
from batchmill.types import DatasetSpec
from batchmill.wire.rows.forms import CHAT, URLS, OpenAIForm, TableForm

MESSAGES = [{"role": "user", "content": "hi"}]
# Two functions, a language model with an adapter, and a service.
NAMES = {"f": (0, 0), "g": (1, 1), "llm": (2, 2), "upper": (2, 3), "mini": (3, 4)}
SERVER = {
    "targets": NAMES, "default": None, "urls": [None, None, frozenset(URLS), frozenset([*URLS, "/v1/moderations"])],
    "services": [3],
    "keys": True, "fold": "deterministic",
}  # fmt: skip


def row(number: int = 0, url: str = CHAT, **body) -> bytes:
    held = {"messages": MESSAGES, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": held}).encode()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (row(), "missing_model", "this job has f, g, llm, mini, upper"),
        (row(model=""), "missing_model", "missing"),
        (row(model="h"), "unknown_model", "'h'"),
        (row(model=7), "invalid_field", "body.model"),
        (row(url="/v1/images", model="llm"), "invalid_url", "/v1/images"),
        (row(url="/v2/x", model="mini"), "invalid_url", "/v2/x"),
        (row(url="/v1/moderations", model="mini"), None, ""),
        (row(url="/v1/moderations", model="mini", base_url="http://x"), "parameter_not_allowed", "base_url"),
        (row(url="/whatever", model="f", messages=7), None, ""),
        (row(url=CHAT, model="f", messages=7), None, ""),
        (row(url=CHAT, model="llm", messages=7), "invalid_field", "messages"),
    ],
)
def test_rows_for_a_server(sealed, write, line, code, words):
    """Each row names one of the job's models and is checked by what that one takes, and by no more."""
    report = sealed(write([line, row(1, model="f")]), **SERVER)
    found = [(problem.code, problem.line) for problem in report.problems]
    assert found == ([] if code is None else [(code, 1)])
    assert code is None or words in report.problems[0].message


@pytest.mark.parametrize("function", [True, False])
def test_one_endpoint(sealed, write, function):
    """A row of another path than the ordered one is refused, and both are named; also where a function takes any."""
    order = {"targets": {"f": (0, 0)}} if function else {"targets": {"m": (0, 0)}, "urls": [frozenset(URLS)]}
    lines = [row(0), row(1, url="/v1/responses", input="x"), row(2)]
    report = sealed(write(lines), endpoint=CHAT, **order)
    assert [(problem.code, problem.line) for problem in report.problems] == [("invalid_url", 2)]
    assert "/v1/responses" in report.problems[0].message and CHAT in report.problems[0].message


def test_the_most_rows(sealed, write):
    """As many rows as are taken are sealed; one more and the dataset is refused."""
    path = write([row(n) for n in range(10)])
    assert sealed(path, rows_max=10).seal.rows == 10
    with pytest.raises(InvalidDataset, match="more than 9 rows") as refused:
        sealed(path, rows_max=9)
    assert refused.value.code == "too_many_rows"


def test_a_long_dataset_is_not_read_to_its_end(home, write, sealed):
    """What is refused for its length is refused as soon as it is too long: no more of it is indexed."""
    path = write([row(n) for n in range(60_000)])
    with pytest.raises(InvalidDataset):
        sealed(path, rows_max=10)
    offsets = home / layout.OFFSETS  # which are gone where what was refused has been cleared
    assert not offsets.exists() or offsets.stat().st_size < 60_000 * 8 // 2


def test_a_table_needs_a_model(sealed, write):
    """Rows of a table name no model: the order has to."""
    with pytest.raises(InvalidDataset) as refused:
        sealed(write(b"n\n1\n", "in.csv"), default=None)
    assert refused.value.code == "missing_model"
    assert sealed(write(b"n\n1\n", "in.csv"), form=TableForm()).seal.rows == 1


def test_many_rows_at_once_are_what_each_is_alone():
    """Rows for functions that are looked at together have the ids and the plan's columns that each has by itself."""
    picked = random.Random(7)
    order = SealOrder(DatasetSpec(["x"]), form=OpenAIForm(), **SERVER)
    lines = [row(n, url="/v1/x", model=picked.choice("fg"), text="ü" * picked.randrange(50)) for n in range(200)]
    rules, inspector = OpenAIRules(order), Inspector(order)
    bulk = rules.bulk(lines)
    assert bulk is not None
    closely = inspector._check_lines(lines, range(len(lines)), harmless=True)
    together = KeyColumns.of_functions(bulk)
    assert bulk.ids == [f"r{n}" for n in range(200)] and closely.keys is not None
    assert together.pack() == closely.keys.pack()
    for other in (row(model="llm"), row(), row(model="h"), row(model="f", url="nowhere"), b'{"custom_id":"a"}'):
        assert rules.bulk([*lines, other]) is None
