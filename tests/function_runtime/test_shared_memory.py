"""Memory of two processes: what is put in comes out, places return, and nothing beyond it is ever read or written."""

import gc
import os
import random
import resource
import zlib

import numpy
import pytest
from fakes.open_files import open_files

from batchmill.function_runtime import frames, shared_memory
from batchmill.function_runtime.shared_memory import PAGE_BYTES, SIZE_BYTES, BrokenPlace, MemoryPair

LARGE = 256 * 1024


@pytest.fixture
def pairs():
    """Make both sides of a memory; the reader's buffers are of this kind."""
    made = []

    def make(kind=bytes):
        ours, theirs = MemoryPair(), MemoryPair()
        with ours.create(kind) as fds:
            theirs.join([os.dup(fd) for fd in fds], kind)
        made.extend([ours, theirs])
        return ours, theirs

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_is_put_is_taken(pairs, kind):
    """Pieces that are put together come out as one buffer of the reader's kind, in both directions."""
    ours, theirs = pairs(kind)
    for writer, reader in ((ours.writer, theirs.reader), (theirs.writer, ours.reader)):
        place = writer.put(b"ab", memoryview(b"c" * LARGE))
        taken = reader.take(place, LARGE + 2)
        assert type(taken) is kind and bytes(taken) == b"ab" + b"c" * LARGE


def test_pieces_of_any_kind_of_numbers(pairs):
    """Views of numbers are put as their bytes: Arrow's buffers are views of signed ones."""
    ours, theirs = pairs()
    numbers = numpy.arange(-4, 4, dtype="i8")
    place = ours.writer.put(memoryview(numbers.view("i1")), memoryview(numbers))
    assert theirs.reader.take(place, 2 * numbers.nbytes) == numbers.tobytes() * 2


def test_a_copy_is_the_readers_own(pairs):
    """A copied place returns at once, and writing to it again does not change the copy."""
    ours, theirs = pairs(bytearray)
    place = ours.writer.put(b"a" * LARGE)
    taken = theirs.reader.take(place, LARGE)
    assert theirs.reader.returned() == [place] and theirs.reader.returned() == []
    ours.writer.release(place)
    assert ours.writer.put(b"b" * LARGE) == place
    assert taken == b"a" * LARGE


def test_a_place_returns_after_its_last_view(pairs):
    """As long as anything refers to a view, in whatever way, its place is not written again."""
    ours, theirs = pairs(memoryview)
    place = ours.writer.put(b"a" * LARGE)
    taken = theirs.reader.take(place, LARGE)
    array = numpy.frombuffer(taken[100:], numpy.uint8)
    part = array[5:10]
    assert not array.flags.writeable
    del taken, array
    gc.collect()
    assert theirs.reader.returned() == []
    assert part.tobytes() == b"aaaaa"
    del part
    gc.collect()
    assert theirs.reader.returned() == [place]


def test_a_view_outlives_the_memory(pairs):
    """A view stays readable after both sides have closed the memory."""
    ours, theirs = pairs(memoryview)
    taken = theirs.reader.take(ours.writer.put(b"a" * LARGE), LARGE)
    ours.close()
    theirs.close()
    assert bytes(taken) == b"a" * LARGE


def test_a_full_memory(pairs):
    """The whole memory can be used, and not a byte more; there is room again once places return."""
    writer = pairs()[0].writer
    assert writer.put(bytes(SIZE_BYTES + 1)) is None
    place = writer.put(bytes(SIZE_BYTES))
    assert place == 0 and writer.put(b"x") is None
    writer.release(place)
    assert writer.put(b"x") == 0


def test_places_do_not_overlap(pairs):
    """Ranges that are put and returned in any order never overlap, and all of the memory is free in the end."""
    writer, chance = pairs()[0].writer, random.Random(5)
    used = {}
    for _ in range(2000):
        size = chance.choice([1, PAGE_BYTES, PAGE_BYTES + 1, LARGE, 3_000_000])
        place = writer.put(bytes(size))
        if place is None or chance.random() < 0.4:
            for begin in chance.sample(sorted(used), len(used) // 2):
                writer.release(begin)
                del used[begin]
        if place is not None:
            assert all(place + size <= begin or end <= place for begin, end in used.items())
            used[place] = place + size
    for begin in used:
        writer.release(begin)
    assert writer.put(bytes(SIZE_BYTES)) == 0


def test_places_that_nobody_can_mean(pairs):
    """A place outside the memory is not read, and one that was not given is not taken back."""
    ours, theirs = pairs()
    for place, size in ((-1, 1), (SIZE_BYTES, 1), (SIZE_BYTES - 1, 2), (0, SIZE_BYTES + 1), (0, -1)):
        with pytest.raises(BrokenPlace):
            theirs.reader.take(place, size)
    place = ours.writer.put(b"x")
    ours.writer.release(place)
    for wrong in (place, 1, SIZE_BYTES):
        with pytest.raises(BrokenPlace):
            ours.writer.release(wrong)


def test_nobody_can_change_its_size():
    """The other process cannot cut the memory off under a writer or a reader."""
    pair = MemoryPair()
    with pair.create() as fds:
        for fd in fds:
            for size in (0, 2 * SIZE_BYTES):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
    pair.close()


def test_a_machine_without_memory_to_share(caplog):
    """Where the kernel refuses a memory, there is none, the log says why, and no descriptor is left."""
    before = open_files()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, limits[1]))
    try:
        pair = MemoryPair()
        with pair.create() as fds:
            assert fds == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (pair.writer, pair.reader) == (None, None)
    assert "no memory can be shared" in caplog.text
    assert not open_files() - before


def test_a_kernel_that_has_no_pages(pairs, monkeypatch):
    """A writer that gets no pages puts nothing: the buffer travels through the socket, and nobody is killed."""
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", 12345)  # as a kernel that does not know it
    ours, theirs = pairs()
    assert ours.writer.put(bytes(LARGE)) is None
    assert frames.pack({}, [bytes(LARGE)], ours.writer)[1] == bytes(LARGE)


SIZES = [0, 10, shared_memory.SHARED_BYTES_MIN - 1, shared_memory.SHARED_BYTES_MIN, 300_000]


def test_frames_with_buffers_in_shared_memory(pairs):
    """Buffers of a frame arrive in order; large ones do not pass the socket, and their places return."""
    ours, theirs = pairs()
    reader, back = frames.Reader(theirs.reader, theirs.writer), frames.Reader(ours.reader, ours.writer)
    sent = [bytes([number + 1]) * size for number, size in enumerate(SIZES)]
    for _ in range(200):  # more than the memory holds
        data = b"".join(map(bytes, frames.pack({"kind": "ask"}, sent, ours.writer)))
        assert len(data) < 80_000
        assert reader.feed(data) == [({"kind": "ask"}, sent)]
        returned = frames.pack_returned(theirs.reader.returned())
        small = b"".join(frames.pack({"n": 1}, [b"x"]))
        assert back.feed(returned + small + small) == [({"n": 1}, [b"x"])] * 2


def test_a_buffer_without_room_is_in_the_frame(pairs):
    """What finds no room in the memory is sent as if there was none."""
    ours, theirs = pairs()
    assert ours.writer.put(bytes(SIZE_BYTES)) == 0
    data = b"".join(map(bytes, frames.pack({}, [b"x" * LARGE], ours.writer)))
    [(_, buffers)] = frames.Reader(theirs.reader).feed(data)
    assert bytes(buffers[0]) == b"x" * LARGE


@pytest.mark.parametrize(
    "sizes",
    [
        [frames.SHARED | frames.SIZE_MASK],
        [frames.SHARED | (SIZE_BYTES // PAGE_BYTES) << frames.PAGE_SHIFT | 1],
        [frames.SHARED | frames.PAGE_MASK << frames.PAGE_SHIFT | 5],
        [frames.SHARED | SIZE_BYTES, frames.SHARED | 1],
    ],
)
def test_forged_places_are_refused(pairs, sizes):
    """A frame that names memory beyond the end, or more than there is, is broken; no memory is read for it."""
    _, theirs = pairs()
    text = b"{}"
    head = frames.HEAD.pack(frames.MAGIC, len(text), len(sizes), zlib.crc32(text))
    data = head + b"".join(size.to_bytes(8, "little") for size in sizes) + text
    with pytest.raises(frames.BrokenFrame, match="memory"):
        frames.Reader(theirs.reader, theirs.writer).feed(data)
    with pytest.raises(frames.BrokenFrame, match="memory"):
        frames.Reader().feed(data)


def test_forged_returns_are_refused(pairs):
    """Whoever returns a place that was not given, or has nothing to return, has broken the protocol."""
    ours, theirs = pairs()
    place = ours.writer.put(bytes(LARGE))
    reader = frames.Reader(ours.reader, ours.writer)
    assert reader.feed(frames.pack_returned([place])) == []
    for data in (frames.pack_returned([place]), frames.pack_returned([place + 1])):
        with pytest.raises(frames.BrokenFrame):
            frames.Reader(ours.reader, ours.writer).feed(data)
    with pytest.raises(frames.BrokenFrame, match="there is none"):
        frames.Reader().feed(frames.pack_returned([0]))


def test_a_place_is_named_once(pairs):
    """A writer that names a place again before it was returned is broken: what waits to be returned is bounded."""
    ours, theirs = pairs()
    place = ours.writer.put(b"x" * LARGE)
    theirs.reader.take(place, LARGE)
    with pytest.raises(BrokenPlace):
        theirs.reader.take(place, LARGE)
    assert theirs.reader.returned() == [place]
