"""Messages between processes: how they end."""

from __future__ import annotations

import asyncio

import pytest

from batchmill.wire import messages


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError])
async def test_the_other_side_has_gone(error):
    """Nothing more comes from somebody who has gone, whichever call found that out."""
    reader = asyncio.StreamReader()
    reader.set_exception(error())
    assert await messages.read(reader) is None


async def test_a_message_that_is_none(monkeypatch):
    """A length that no message has is somebody else's protocol, not an end; the longest message is read."""
    monkeypatch.setattr(messages, "MESSAGE_BYTES_MAX", 4)
    reader = asyncio.StreamReader()
    reader.feed_data((4).to_bytes(4, "little") + b"abcd" + (5).to_bytes(4, "little"))
    assert await messages.read(reader) == b"abcd"
    with pytest.raises(ConnectionError, match="5 bytes"):
        await messages.read(reader)
