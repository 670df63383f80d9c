"""Figures and foreign text as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.cli import text


@pytest.mark.parametrize(
    ("call", "value", "expected"),
    [
        (text.short, 0, "0"), (text.short, 0.5312, "0.53"), (text.short, 7.06, "7.1"), (text.short, 512.3, "512"),
        (text.short, 9_999, "9,999"), (text.short, 40_200, "40.2k"), (text.short, 1.3e6, "1.3M"),
        (text.money, 0, "$0.00"), (text.money, 0.0123, "$0.0123"), (text.money, 1234.5, "$1,234.50"),
        (text.money, 0.0000123, "$0.000012"), (text.money, 1e-9, "under $0.000001"),
        (text.duration, 0.44, "0.4 s"), (text.duration, 12, "12 s"), (text.duration, 185, "3:05 min"),
        (text.duration, 7380, "2:03:00 h"), (text.size, 1, "1 byte"), (text.size, 3400, "3.4 kB"),
        (text.count, 1234567, "1,234,567"),
    ],
)  # fmt: skip
def test_figures_are_short(call, value, expected):
    """Figures are written with as many digits as a person needs."""
    assert call(value) == expected


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [(0, 10, "0 %"), (1, 1000, "under 1 %"), (999, 1000, "99 %"), (10, 10, "100 %"), (1, 0, "0 %")],
)
def test_a_share_never_claims_too_much(part, whole, expected):
    """All means all, and something is never nothing."""
    assert text.percent(part, whole) == expected


@given(st.text(st.characters(codec=None)))
def test_clean_text_steers_nothing(foreign):
    """Whatever is printed is one line of printable text that UTF-8 can hold, and no longer than the maximum."""
    for lines in (False, True):
        shown = text.clean(foreign, 40, lines=lines)
        assert len(shown) <= 40
        shown.encode()
        assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in shown if not (lines and each in "\n\t"))


def test_clean_text_is_cut_at_the_maximum():
    """Text at the maximum is whole; one character more is cut and marked."""
    assert text.clean("x" * 500) == "x" * 500
    assert text.clean("x" * 501) == "x" * 499 + "…"
