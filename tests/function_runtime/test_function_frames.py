import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.function_runtime import frames

SIZES = st.sampled_from([0, 1, 5, 1000, frames.LARGE_BYTES - 1, frames.LARGE_BYTES, frames.ROOM_BYTES, 300_000])


def joined(meta, buffers):
    return b"".join(bytes(piece) for piece in frames.pack(meta, buffers))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(SIZES, max_size=3), max_size=8),
    st.lists(st.sampled_from([1, 16, 999, 70_000, 600_000]), min_size=1),
)
def test_frames_come_whole_however_they_are_cut(shapes, cuts):
    """What is packed is read again, in order, wherever the bytes are cut."""
    sent = [({"kind": "a", "n": n}, [bytes([n]) * size for size in sizes]) for n, sizes in enumerate(shapes)]
    data, reader, came, at = b"".join(joined(*each) for each in sent), frames.Reader(), [], 0
    lengths = itertools.cycle([*cuts, 600_000])
    while at < len(data):
        length = next(lengths)
        came += reader.feed(data[at : at + length])
        at += length
    assert [(meta, [bytes(each) for each in buffers]) for meta, buffers in came] == sent


def test_the_buffers_of_a_large_frame_are_not_copied():
    """They are parts of the one piece of memory that was received into, and lie as numbers want it."""
    data = joined({"kind": "x"}, [b"{}", b"a" * frames.LARGE_BYTES, b"b" * 64])
    reader = frames.Reader()
    [(_, buffers)] = reader.feed(data)[:1] or reader.feed(b"")
    assert [bytes(each[:1]) for each in buffers] == [b"{", b"a", b"b"]
    place = data.index(b"a" * frames.LARGE_BYTES)
    assert place % frames.ALIGN == 0


def test_the_most_buffers():
    """A frame may have as many buffers as the limit says, and not one more."""
    [(_, buffers)] = frames.Reader().feed(joined({}, [b"x"] * frames.BUFFERS_MAX))
    assert len(buffers) == frames.BUFFERS_MAX
    with pytest.raises(frames.BrokenFrame):
        frames.Reader().feed(joined({}, [b""] * (frames.BUFFERS_MAX + 1)))


@pytest.mark.parametrize("spoil", [0, 12, 30])
def test_what_is_no_frame_is_refused(spoil):
    """Bytes that somebody else wrote are never taken for a frame."""
    data = bytearray(joined({"kind": "ask"}, [b"[]"]))
    data[spoil] ^= 1
    with pytest.raises(frames.BrokenFrame):
        frames.Reader().feed(data)
