"""Rows with fields that only LoRAX has: refused before one runs, where the engine is one of ours."""

from __future__ import annotations

import pytest

from batchmill.datasets import bodies
from batchmill.errors import InvalidRow
from batchmill.wire.fields import REFUSED
from batchmill.wire.rows.forms import CHAT, COMPLETIONS

BODIES = {CHAT: b'"messages":[{"role":"user","content":"x"}]', COMPLETIONS: b'"prompt":"x"'}


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_the_engine_would_misread(url, name):
    """It is refused by the field's name; a service of somebody else's may know it, and null says nothing."""
    body = b'{"%b":"x",%b}' % (name.encode(), BODIES[url])
    with pytest.raises(InvalidRow, match=f"body.{name} is not supported"):
        bodies.check(url, body, is_ours=True)
    assert bodies.check(url, body) is None
    for nothing in (b"null", b'""'):
        assert bodies.check(url, body.replace(b'"x"', nothing, 1), is_ours=True) is None
