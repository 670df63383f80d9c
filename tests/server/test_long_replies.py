"""Long replies: they are rewritten elsewhere, and sent one after the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.held_clock import HeldClock
from server.small_api import SmallDialect

from batchmill.children.programs import Programs
from batchmill.dialects.openai import dialect
from batchmill.dialects.openai.dialect import recode
from batchmill.dialects.predibase import lorax
from batchmill.dialects.predibase.lorax import Generate, Parameters
from batchmill.engines.clock import SystemClock
from batchmill.server import replies
from batchmill.server.access_log import RequestRecord
from batchmill.server.http import PIECE_BYTES, _Reply
from batchmill.server.replies import rewritten
from batchmill.server.reply_heads import ReplyHeads
from batchmill.types import Caller, Scope
from batchmill.wire.json_bytes import encode

VECTORS = encode({"data": [{"embedding": [0.5, 1.0]}]})
COMPLETION = encode({"choices": [{"text": "b", "finish_reason": "stop", "token_ids": [1]}]})
CASES = [
    (recode, b"base64\n" + VECTORS),
    (lorax.embedded, VECTORS),
    (lorax.write, lorax.pack(Generate("a", Parameters(details=True)), COMPLETION)),
]


@pytest.fixture
async def call():
    programs = Programs(HeldClock())
    yield SimpleNamespace(programs=programs, caller=Caller("p", Scope.SUBMIT))
    await programs.close()


async def test_one_long_reply_is_sent_in_a_turn():
    """However many long replies are ready at once, others have their turn between any two of them."""
    turns, sent, turn = 0, [], asyncio.Lock()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(turns)

    counting = asyncio.create_task(count())
    heads = ReplyHeads(SystemClock())
    replies = [
        _Reply({"method": "GET"}, send, RequestRecord("r", "GET", started=0.0), SmallDialect(), turn, heads)
        for _ in range(20)
    ]
    long = {"type": "http.response.body", "body": b"x" * (PIECE_BYTES + 1)}
    await asyncio.gather(*[each.send(dict(long)) for each in replies])
    counting.cancel()
    assert len(set(sent)) == 20


async def test_long_replies_are_rewritten_in_a_child(call, monkeypatch):
    """A long reply comes to what a short one does, and not a byte of it is read on the loop."""
    expected = [await rewritten(call, rewrite, order) for rewrite, order in CASES]
    assert json.loads(expected[0])["data"][0]["embedding"] == "AAAAPwAAgD8="
    monkeypatch.setattr(replies, "INLINE_BYTES_MAX", 10)
    monkeypatch.setattr(dialect, "with_encoding", None)
    monkeypatch.setattr(lorax, "_read", None)
    monkeypatch.setattr(lorax, "read_answer", None)
    assert [await rewritten(call, rewrite, order) for rewrite, order in CASES] == expected
