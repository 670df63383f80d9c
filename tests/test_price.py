"""Prices as people write them, as they are shown, and what rows cost."""

from __future__ import annotations

import pytest

from batchmill import config
from batchmill.models.registry import resolve
from batchmill.types import Price, Usage


@pytest.mark.parametrize(
    ("expected", "price", "words", "cost"),
    [
        (0.5, Price(0.5, None, 0.5), "0.5", 1.5),
        (2, Price(2, None, 2), "2", 6.0),
        (0, Price(), "0", 0.0),
        (Price(0.5, 0.5, 0.5), Price(0.5, 0.5, 0.5), "0.5", 1.5),
        (Price(1, None, 2), Price(1, None, 2), "1 in, 2 out", 4.0),
        (Price(1, 0.25, 2), Price(1, 0.25, 2), "1 in, 0.25 cached, 2 out", 3.25),
        (Price(1, 0.25, 1), Price(1, 0.25, 1), "1 in, 0.25 cached, 1 out", 2.25),
    ],
)
def test_one_price_or_several(expected, price, words, cost):
    """One number is what every token costs; it is shown as one, and only where it is."""
    found = Price.of(expected)
    assert (found, found.in_words) == (price, words)
    assert found.cost(Usage(2_000_000, 1_000_000, 1_000_000)) == cost


def test_no_price_stays_none():
    """What has no price costs nobody knows what."""
    assert Price.of(None) is None


def test_the_configuration_takes_one_number(tmp_path):
    """`price = 0.5` is a price of input and output alike."""
    (tmp_path / "batchmill.toml").write_text(
        '[models.m]\nengine = "openai"\nsource = "s"\nbase_url = "http://h/v1"\nprice = 0.5\n'
    )
    found = config.load(environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    assert resolve("m", found, cwd=tmp_path).price == Price(0.5, None, 0.5)
