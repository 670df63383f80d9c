"""Answers that are read while they arrive: cut anywhere, broken off anywhere."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.client import calls
from batchmill.client.messages import Broken, HttpReply
from batchmill.client.streams import BREAKS_MAX, FileContent, JsonLines, Views, refusal
from batchmill.errors import Conflict, InvalidInput, Unavailable, UnknownName
from batchmill.types import JobView
from batchmill.wire.native import ErrorDetail, ErrorReply

BREAK = Broken("gone", was_sent=True)
HEAD = {"content-type": "application/jsonl", "etag": '"file-1"'}


def event(view, name):
    return f"id: {name}\nevent: view\ndata: ".encode() + msgspec.json.encode(view) + b"\n\n"


def cut(data, places):
    """`data` in pieces, cut at these places."""
    at = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[first:last] for first, last in zip(at, at[1:], strict=False)]


VIEWS = [JobView("job_1", "running", rows=3, rows_ok=n, message="ü\nx") for n in range(3)]
EVENTS = b": hello\n\n" + b"".join(event(view, n) for n, view in enumerate(VIEWS)) + b"event: end\ndata: {}\n\n"


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_events_may_be_cut_anywhere(places):
    """Views come out whole wherever the network cuts them, and the end ends the stream."""
    stream = Views("job_1", 0.5)
    stream.begin(200, {})
    assert [view for piece in cut(EVENTS, places) for view in stream.feed(piece)] == VIEWS
    assert stream.is_over and stream.end() == []


def test_a_broken_watch_goes_on():
    """Half an event is dropped; the next connection says which whole one was seen last."""
    stream = Views("job_1", 0.5)
    assert "last-event-id" not in stream.request().headers
    stream.begin(200, {})
    assert stream.feed(event(VIEWS[0], "a") + event(VIEWS[1], "b")[:-5]) == [VIEWS[0]]
    assert stream.broke(BREAK) > 0
    assert stream.request().headers["last-event-id"] == "a" and not stream.is_over
    stream.begin(200, {})
    assert stream.feed(event(VIEWS[1], "b")) == [VIEWS[1]]


def test_a_watch_that_only_stops_is_not_at_its_end():
    """A server that stops closes its streams: the job has not come to rest by that."""
    stream = Views("job_1", 0.5)
    stream.begin(200, {})
    stream.feed(event(VIEWS[0], "a"))
    with pytest.raises(Broken):
        stream.end()


def test_patience_with_a_stream_ends():
    """A server that does not come back is told of after a bounded number of tries; anything heard begins anew."""
    stream = Views("job_1", 0.5)
    for _ in range(BREAKS_MAX - 1):
        stream.broke(BREAK)
    stream.feed(b": still here\n\n")
    waits = [stream.broke(BREAK) for _ in range(BREAKS_MAX - 1)]
    assert 15 < sum(waits) < 60
    with pytest.raises(Unavailable):
        stream.broke(BREAK)


ROWS = [{"custom_id": f"c{n}", "text": "x" * n} for n in range(20)]
TEXT = b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS)


@given(st.lists(st.integers(0, 10_000), max_size=30), st.booleans())
def test_lines_may_be_cut_anywhere(places, ends_with_newline):
    """Rows come out whole wherever the network cuts them, the last one also without a line end."""
    data = TEXT if ends_with_newline else TEXT[:-1]
    stream = JsonLines(FileContent(calls.results("job_1")))
    stream.begin(200, HEAD | {"content-length": str(len(data))})
    rows = [row for piece in cut(data, places) for row in stream.feed(piece)]
    assert rows + stream.end() == ROWS and stream.is_over


@given(st.integers(1, len(TEXT) - 1))
def test_a_broken_download_goes_on_where_it_was(place):
    """The rest of the file is asked for by range, if it is still the same file, and the rows come out once."""
    stream = JsonLines(FileContent(calls.results("job_1")))
    stream.begin(200, HEAD | {"content-length": str(len(TEXT))})
    rows = stream.feed(TEXT[:place])
    stream.broke(BREAK)
    headers = stream.request().headers
    assert headers["range"] == f"bytes={place}-" and headers["if-range"] == '"file-1"'
    stream.begin(206, HEAD | {"content-length": str(len(TEXT) - place)})
    rows += stream.feed(TEXT[place:])
    assert rows + stream.end() == ROWS


def test_a_file_that_changed_is_not_joined_to_the_old_one():
    """A server that answers with the whole of another file is refused: nothing is put together from two."""
    stream = FileContent(calls.results("job_1"))
    stream.begin(200, HEAD)
    stream.feed(b"abc")
    stream.broke(BREAK)
    with pytest.raises(Conflict):
        stream.begin(200, HEAD | {"etag": '"file-2"'})


def test_a_body_that_is_too_short_is_a_break():
    """A connection that closes early is not an end of the file, after a resumption neither."""
    stream = FileContent(calls.results("job_1"))
    stream.begin(200, HEAD | {"content-length": "6"})
    stream.feed(b"abc")
    with pytest.raises(Broken, match="3 of 6 bytes"):
        stream.end()
    stream.begin(206, HEAD | {"content-length": "3"})
    stream.feed(b"de")
    with pytest.raises(Broken, match="5 of 6 bytes"):
        stream.end()
    assert not stream.is_over


def test_rows_so_far_are_not_taken_up():
    """Partial results are another file each time: a break in the middle is told, one before the first byte is not."""
    stream = JsonLines(FileContent(calls.partial("job_1"), is_resumable=False))
    assert stream.broke(BREAK) > 0
    stream.begin(200, HEAD)
    stream.feed(b"{}\n")
    with pytest.raises(Unavailable):
        stream.broke(BREAK)


def test_results_that_are_no_lines_are_not_read_as_such():
    """CSV and Parquet are downloaded: the refusal says so."""
    with pytest.raises(InvalidInput, match="text/csv: download them"):
        JsonLines(FileContent(calls.results("job_1"))).begin(200, {"content-type": "text/csv; charset=utf-8"})


def test_what_refuses_a_stream_is_told_apart():
    """A server that is starting is come back to; a job that is not there is an error."""
    starting = ErrorReply(ErrorDetail("unavailable", "starting", "system", True))
    gone = ErrorReply(ErrorDetail("unknown_job", "no such job", "caller"))
    assert isinstance(refusal(HttpReply(503, {}, msgspec.json.encode(starting))), Broken)
    assert isinstance(refusal(HttpReply(404, {}, msgspec.json.encode(gone))), UnknownName)
