"""Secrets taken out of a stream of bytes."""

from __future__ import annotations

import pytest

from batchmill.models.redaction import Scrubber

KEY = "sk-very-secret-key"


@pytest.mark.parametrize("cut", range(1, len(KEY)))
def test_a_secret_in_two_pieces(cut: int) -> None:
    """Wherever a secret is cut in two it is found, and what only looks like its beginning comes through."""
    scrubber = Scrubber([KEY.encode()])
    text = f"a {KEY} sk-very b {KEY[:cut]}".encode()
    pieces = [scrubber.feed(text[: 2 + cut]), scrubber.feed(text[2 + cut :]), scrubber.rest()]
    assert b"".join(pieces) == f"a *** sk-very b {KEY[:cut]}".encode()


def test_a_secret_byte_by_byte() -> None:
    """A stream of single bytes shows no secret, and nothing else is lost or held back for good."""
    scrubber = Scrubber([b"aabaabaac-secret", b"baab-other"])
    text = b"xaabaabaabaac-secret.baabaab-other!baab-othe"
    out = b"".join(scrubber.feed(bytes([each])) for each in text) + scrubber.rest()
    assert out == b"xaab***.baa***!baab-othe"


def test_without_secrets_nothing_is_held_back() -> None:
    """Where there is no secret a piece is handed on as it came."""
    piece = b"data: x"
    assert Scrubber([]).feed(piece) is piece
