"""Adapters of a model hub that rows name before anybody has registered them."""

from __future__ import annotations

import json

import pytest

from batchmill.datasets import sealing, validation
from batchmill.datasets.validation import HubPatterns, is_hub_id
from batchmill.errors import InvalidDataset
from batchmill.wire.rows.forms import CHAT, URLS, TableForm

PATTERNS = [("acme/*", 0, 0), ("*/lora-*", 1, 2)]
JOB = {
    "targets": {"base": (0, 0), "tuned": (0, 1), "other": (1, 2)}, "patterns": PATTERNS, "keys": True,
    "urls": [frozenset(URLS), frozenset(URLS)],
}  # fmt: skip


def row(number: int, model: str | None = None) -> bytes:
    body = {"messages": [{"role": "user", "content": "hi"}]} | ({} if model is None else {"model": model})
    return json.dumps({"custom_id": f"r{number}", "url": CHAT, "body": body}).encode()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("acme/Tuned-7b.v2_x", True), ("a/b", True), ("acme", False), ("acme/a/b", False), ("../a", False),
        ("acme/..", False), ("/etc/passwd", False), ("acme/", False), ("acme/a b", False), ("acme/a\n", False),
        ("-a/b", False), ("a/b" + "c" * 187, True), ("a/b" + "c" * 188, False),
    ],
)  # fmt: skip
def test_what_an_id_of_a_hub_is(name, is_one):
    """OWNER/NAME, and nothing that could be a path or be too long for a name."""
    assert is_hub_id(name) is is_one


@pytest.mark.parametrize(
    ("name", "base"),
    [("acme/a", (0, 0)), ("acme/lora-a", (0, 0)), ("x/lora-a", (1, 2)), ("x/a", None), ("acme/../a", None)],
)
def test_the_first_pattern_counts(name, base):
    """An adapter is for the model of the first pattern that it matches."""
    assert HubPatterns(PATTERNS).base_of(name) == base


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "validators"])
def test_sealing_finds_them(write, sealed, monkeypatch, alone):
    """Names that match are reported once, whoever read the rows; names that are known are not among them."""
    if not alone:
        monkeypatch.setattr("batchmill.datasets.checking.fan_out.INLINE_BYTES_MAX", 0)
    names = [None, "base", "tuned", "acme/b", "acme/a", "x/lora-1", "acme/b"]
    report = sealed(write([row(number, names[number % 7]) for number in range(70)]), **JOB)
    assert (report.adapters, report.rejected) == (["acme/a", "acme/b", "x/lora-1"], 0)


def test_other_names_are_refused(write, sealed):
    """A name that matches no pattern is refused on its line, with what there is."""
    report = sealed(write([row(1, "acme/a"), row(2, "elsewhere/a"), row(3, "acme/../x")]), **JOB)
    assert [(each.code, each.line) for each in report.problems] == [("unknown_model", 2), ("unknown_model", 3)]
    assert report.problems[0].message == (
        "body.model is 'elsewhere/a'; this job has base, other, tuned, and adapters like acme/*, */lora-*"
    )
    assert report.adapters == ["acme/a"]


def test_a_prompt_may_name_one(write, sealed):
    """All rows of a table may go to an adapter that is yet to be fetched."""
    form = TableForm(prompt="{text}", params={"model": "acme/a"})
    report = sealed(write([b'{"text":"x"}', b'{"text":"y"}']), form=form, **JOB)
    assert (report.adapters, report.rejected) == (["acme/a"], 0)


@pytest.mark.parametrize(("count", "is_refused"), [(5, False), (6, True)])
def test_their_number_is_bounded(write, sealed, monkeypatch, count, is_refused):
    """As many as may be fetched pass; with one more the dataset is refused as a whole."""
    for module in (validation, sealing):
        monkeypatch.setattr(module, "ADAPTERS_MAX", 5)
    path = write([row(number, f"acme/a{number % count}") for number in range(60)])
    if not is_refused:
        assert len(sealed(path, **JOB).adapters) == count
        return
    with pytest.raises(InvalidDataset, match="more than 5 adapters") as refused:
        sealed(path, **JOB)
    assert refused.value.code == "too_many_adapters"
