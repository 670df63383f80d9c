"""Which members of a reply `filter_path` leaves."""

from __future__ import annotations

import pytest

from batchmill.dialects.ml_commons.programs import apply_filter_path

REPLY = {
    "took": 3,
    "hits": {
        "total": {"value": 2, "relation": "eq"},
        "hits": [
            {"_id": "a", "_source": {"name": "one", "model_state": "DEPLOYED"}},
            {"_id": "b", "_source": {"name": "two"}},
        ],
    },
    "empty": None,
}


@pytest.mark.parametrize(
    ("expression", "left"),
    [
        ("took", {"took": 3}),
        ("empty", {"empty": None}),
        ("hits.total.value", {"hits": {"total": {"value": 2}}}),
        ("hits.hits._id", {"hits": {"hits": [{"_id": "a"}, {"_id": "b"}]}}),
        ("hits.hits._source.model_state", {"hits": {"hits": [{"_source": {"model_state": "DEPLOYED"}}]}}),
        ("h*.t*.v*e", {"hits": {"total": {"value": 2}}}),
        ("**.name", {"hits": {"hits": [{"_source": {"name": "one"}}, {"_source": {"name": "two"}}]}}),
        ("took, hits.total.relation", {"took": 3, "hits": {"total": {"relation": "eq"}}}),
        ("-hits", {"took": 3, "empty": None}),
        ("hits,-hits.hits", {"hits": {"total": {"value": 2, "relation": "eq"}}}),
        ("-**._source,-took,-empty,-hits.total", {"hits": {"hits": [{"_id": "a"}, {"_id": "b"}]}}),
        ("nothing.like.it", {}),
        ("took.deeper", {}),
    ],
)
def test_paths_choose_members(expression, left):
    """Paths, stars and exclusions leave exactly the members that they name, in the order of the reply."""
    assert apply_filter_path(REPLY, expression) == left


def test_many_stars_cost_no_more_than_they_are_long():
    """An expression made to be slow is answered at once: it is matched in one pass."""
    name = "a" * 50_000
    assert apply_filter_path({name: 1}, "*a" * 2000 + "b") == {}
    assert apply_filter_path({name: 1}, "a*" * 2000) == {name: 1}
