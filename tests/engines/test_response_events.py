"""How the streams of the Responses API end."""

import json

from batchmill.engines.llm.live import ResponseEvents


def event(name: str, **data) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json.dumps({"type": name, **data}).encode() + b"\n\n"


def fed(stream: bytes, size: int) -> bytes:
    events = ResponseEvents()
    return b"".join(events.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + events.flush()


def names(stream: bytes) -> list[tuple[str, str]]:
    """What each event calls itself, in its head and in its data."""
    found = []
    for each in stream.split(b"\n\n")[:-1]:
        head, data = each.decode().split("\n")
        found.append((head.removeprefix("event: "), json.loads(data.removeprefix("data: "))["type"]))
    return found


def test_a_stream_ends_as_its_response_does():
    """What was cut off ends with `response.incomplete`, what failed with `response.failed`, however it is cut up."""
    for status, name in (("incomplete", "incomplete"), ("failed", "failed"), ("completed", "completed")):
        last = {"sequence_number": 2, "response": {"id": "r", "status": status, "output": [{"text": "a\n\nb"}]}}
        delta = event("response.output_text.delta", delta="response.completed", sequence_number=1)
        stream = delta + event("response.completed", **last)
        for size in (1, 7, 64, len(stream)):
            received = fed(stream, size)
            assert names(received)[0] == ("response.output_text.delta",) * 2
            assert names(received)[1] == (f"response.{name}",) * 2
            assert json.loads(received.split(b"data: ")[-1]) == {"type": f"response.{name}", **last}


def test_what_is_no_event_of_its_kind_passes():
    """Comments, broken JSON and a stream without an end are handed on to the last byte."""
    for stream in (b": wait\n\n", b"data: {response.completed\n\n", b"data: response.completed", b"\n\n\n\n", b""):
        assert fed(stream, 3) == stream
