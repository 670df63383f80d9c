"""Media columns in batches of providers with parts of their own."""

import asyncio
import threading
from base64 import b64encode

import msgspec
import pytest
from blake3 import blake3
from engines.provider_batch_support import Ground, HeldLease, batch_model
from fakes.batch_provider import BatchProvider
from fakes.web_files import WebFile, web_files

from batchmill.datasets.media.loading import read_part
from batchmill.engines.provider_batch.anthropic_chat import to_messages
from batchmill.engines.provider_batch.gemini_chat import to_content_request
from batchmill.models import secrets
from batchmill.types import MediaColumn, Provision, Row
from batchmill.wire.json_bytes import split_object
from batchmill.wire.rows.forms import TableForm
from batchmill.wire.rows.rendered_rows import MediaPart, with_media

PNG, PDF, WAV = b"\x89PNG\r\n\x1a\n..", b"%PDF-1.7", b"RIFF1234WAVEfmt "
TYPES = {"image": ("image/png", PNG), "document": ("application/pdf", PDF), "audio": ("audio/wav", WAV)}


def body_of(*kinds: str) -> dict:
    """The request of a row whose cells hold such media."""
    parts, cells = [], {"q": "?"}
    for kind in kinds:
        name, data = TYPES[kind]
        cells[kind] = b64encode(data).decode()
        parts.append(MediaPart(kind, name, len(data), blake3(data).hexdigest(), column=kind))
    form = TableForm("{q}", media=[MediaColumn(kind, kind) for kind in kinds])
    row = Row(0, 0, with_media(msgspec.json.encode(cells), parts), form)
    row.media = tuple(read_part(part, split_object(row.raw)) for part in parts)
    return msgspec.json.decode(form.request(row).body)


def test_anthropic_gets_blocks_before_the_text():
    """An image and a document, in the order of the columns."""
    (message,) = to_messages({**body_of("image", "document"), "model": "m", "max_tokens": 5})["messages"]
    image, document, text = message["content"]
    assert image["source"] == {"type": "base64", "media_type": "image/png", "data": b64encode(PNG).decode()}
    assert document["type"] == "document" and document["source"]["data"] == b64encode(PDF).decode()
    assert text == {"type": "text", "text": "?"}


def test_gemini_gets_inline_data():
    """Images, documents and recordings."""
    (content,) = to_content_request({**body_of("image", "document", "audio"), "model": "m"})["contents"]
    *media, text = content["parts"]
    assert [part["inlineData"] for part in media] == [
        {"mimeType": name, "data": b64encode(data).decode()} for name, data in TYPES.values()
    ]
    assert text == {"text": "?"}


@pytest.mark.parametrize("ending", ["pause", "over"])
async def test_a_job_ends_while_media_are_loaded(ending, tmp_path):
    """Nothing is uploaded then, and its rows stay undone."""
    gate, form = threading.Event(), TableForm("{q}", media=[MediaColumn("image", "img")])
    async with BatchProvider() as provider:
        with web_files() as web:
            secrets.take(Provision(private_hosts=[web.host]))
            web.files["/slow.png"] = WebFile(PNG, gate=gate)
            part = MediaPart("image", url=f"{web.url}/slow.png", column="img")
            rows = [Row(n + 100, n, with_media(b'{"q":"?"}', [part]), form) for n in range(3)]
            ground, lease = Ground(batch_model(provider.base_url), tmp_path), HeldLease(3)
            running = ground.start((lease, rows))
            async with asyncio.timeout(30):
                while not web.requests:
                    await asyncio.sleep(0.005)
            lease.end(ending)
            await running.finish()
            gate.set()
            secrets.take(Provision())
        assert lease.has_left and not provider.batches and not ground.sink.outcomes
