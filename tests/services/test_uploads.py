"""Files that arrive in parts."""

from __future__ import annotations

import asyncio
import hashlib
import os

import pytest
from file_room import FileRoom

from batchmill.errors import BatchmillError, InvalidInput, InvalidTransition, TooLarge, UnknownName
from batchmill.services.files.uploads import KEPT_S, LIFETIME_S, PART_BYTES_MAX, PARTS_MAX, REPEATS_MAX


@pytest.fixture
def room(tmp_path):
    room = FileRoom(tmp_path, file_bytes_max=1000)
    yield room
    room.close()


async def test_parts_become_one_file(room):
    """The file holds the parts in the order of its completion, not that of their arrival, and the parts are gone."""
    upload = await room.begin(9, file_expires_s=3600)
    second, first, unused = [await room.part(upload, data) for data in (b"second", b"1st", b"again")]
    room.clock.at += 5
    record, file = await room.uploads.complete("one", upload, part_ids=[first, second])
    assert (record.status, record.file) == ("completed", file.id)
    assert (file.bytes, file.filename, file.purpose) == (9, "rows.jsonl", "batch")
    assert (file.created, file.expires) == (room.clock.now(), room.clock.now() + 3600)
    assert await room.read(file) == b"1stsecond"
    assert room.left() == [file.id]
    assert await room.uploads.get("one", upload) == record


@pytest.mark.parametrize("md5", [False, True])
async def test_large_parts_are_joined_whole(tmp_path, md5):
    """Parts larger than one call of the kernel copies, or one piece that is read, arrive byte for byte."""
    room = FileRoom(tmp_path)
    parts = [os.urandom(3_000_001), b"", os.urandom(2_500_000)]
    upload = await room.begin(5_500_001)
    ids = [await room.part(upload, data) for data in parts]
    whole = b"".join(parts)
    digest = hashlib.md5(whole).hexdigest().upper() if md5 else None
    _, file = await room.uploads.complete("one", upload, part_ids=ids, md5=digest)
    assert room.files.path(file).read_bytes() == whole
    room.close()


async def test_completing_again_is_no_error(room):
    """Who asks again for what is done, at the same time or later, gets the same file; there is one."""
    upload = await room.begin(3)
    part = await room.part(upload, b"abc")
    request = [room.uploads.complete("one", upload, part_ids=[part]) for _ in range(5)]
    done = await asyncio.gather(*request)
    room.reopen()
    done.append(await room.uploads.complete("one", upload, part_ids=[part]))
    assert len({(record.id, record.status, file) for record, file in done}) == 1
    assert len(room.left()) == 1


@pytest.mark.parametrize(
    ("choose", "code"),
    [
        (lambda ids: [], "invalid_part_ids"),
        (lambda ids: [ids[0], ids[0]], "invalid_part_ids"),
        (lambda ids: [ids[0], "part_0"], "invalid_part_ids"),
        (lambda ids: [ids[0], "../x"], "invalid_part_ids"),
        (lambda ids: [str(n) for n in range(PARTS_MAX + 1)], "invalid_part_ids"),
        (lambda ids: ids[:1], "upload_size_mismatch"),
        (lambda ids: ids, "upload_size_mismatch"),
    ],
)
async def test_parts_that_do_not_make_the_file(room, choose, code):
    """Parts that are not the upload's, come twice or do not add up are refused, and the upload goes on."""
    upload = await room.begin(5)
    ids = [await room.part(upload, data) for data in (b"abc", b"de", b"f")]
    with pytest.raises(InvalidInput) as caught:
        await room.uploads.complete("one", upload, part_ids=choose(ids))
    assert caught.value.code == code
    assert (await room.uploads.complete("one", upload, part_ids=ids[:2]))[1].bytes == 5


async def test_a_part_of_another_upload(room):
    """Parts belong to the upload they were added to."""
    one, two = await room.begin(3), await room.begin(3)
    part = await room.part(one, b"abc")
    with pytest.raises(InvalidInput, match="not a part of the upload"):
        await room.uploads.complete("one", two, part_ids=[part])


async def test_a_wrong_md5_leaves_the_upload_as_it_was(room):
    """When the bytes are not those that were meant, no file is made, and the parts stay to be tried again."""
    upload = await room.begin(3)
    part = await room.part(upload, b"abc")
    with pytest.raises(InvalidInput) as caught:
        await room.uploads.complete("one", upload, part_ids=[part], md5="0" * 32)
    assert caught.value.code == "md5_mismatch"
    assert room.left() == [f".parts/{part}"]
    right = hashlib.md5(b"abc").hexdigest()
    assert (await room.uploads.complete("one", upload, part_ids=[part], md5=right))[0].status == "completed"


async def test_a_part_that_was_damaged(room):
    """Parts that are not on the disk as they were acknowledged make no file."""
    upload = await room.begin(6)
    parts = [await room.part(upload, data) for data in (b"abc", b"def")]
    os.truncate(room.data_dir / "files" / ".parts" / parts[1], 2)
    with pytest.raises(BatchmillError) as caught:
        await room.uploads.complete("one", upload, part_ids=parts)
    assert caught.value.code == "damaged_file"
    assert await room.files.list("one") == ([], False)


async def test_cancelling_drops_the_parts(room):
    """A cancelled upload holds nothing, takes nothing more, and may be cancelled again."""
    upload = await room.begin(3)
    part = await room.part(upload, b"abc")
    assert (await room.uploads.cancel("one", upload)).status == "cancelled"
    assert (await room.uploads.cancel("one", upload)).status == "cancelled"
    assert room.left() == []
    for call in (room.part(upload, b"x"), room.uploads.complete("one", upload, part_ids=[part])):
        with pytest.raises(InvalidTransition) as caught:
            await call
        assert caught.value.code == "upload_not_pending"


async def test_a_completed_upload_is_not_cancelled(room):
    """What became a file stays one, and takes no more parts."""
    upload = await room.begin(1)
    await room.uploads.complete("one", upload, part_ids=[await room.part(upload, b"a")])
    for call in (room.uploads.cancel("one", upload), room.part(upload, b"x")):
        with pytest.raises(InvalidTransition):
            await call


async def test_an_upload_that_ends_while_a_part_arrives(room):
    """A part that was under way when its upload ended is refused and leaves nothing."""
    upload = await room.begin(3)
    writer = await room.uploads.part_writer("one", upload)
    await writer.write(b"abc")
    await room.uploads.cancel("one", upload)
    with pytest.raises(InvalidTransition):
        await writer.commit()
    await writer.discard()
    assert room.left() == []


async def test_an_upload_expires(room):
    """After an hour an upload takes nothing more, and a sweep drops what it held."""
    upload = await room.begin(3)
    part = await room.part(upload, b"abc")
    assert await room.uploads.sweep() == 0
    room.clock.at += LIFETIME_S
    assert (await room.uploads.get("one", upload)).status == "expired"
    with pytest.raises(InvalidTransition, match="expired"):
        await room.uploads.complete("one", upload, part_ids=[part])
    assert await room.uploads.sweep() == 1
    assert room.left() == [] and (await room.uploads.get("one", upload)).status == "expired"
    room.clock.at += KEPT_S
    await room.uploads.sweep()
    with pytest.raises(UnknownName):
        await room.uploads.get("one", upload)


async def test_a_restart_keeps_parts(room):
    """A part that was acknowledged is there after a restart; one that was not is swept."""
    upload = await room.begin(3)
    part = await room.part(upload, b"abc")
    (room.data_dir / "files" / ".parts" / "part_of_nobody").write_text("x")
    room.reopen()
    await room.files.sweep()
    await room.uploads.sweep()
    assert room.left() == [f".parts/{part}"]
    assert (await room.uploads.complete("one", upload, part_ids=[part]))[1].bytes == 3


async def test_projects_do_not_see_each_other(room):
    """Another project's upload is unknown in the same words as one that never was."""
    upload, never = await room.begin(3), "upload_" + "0" * 24
    for ask in (
        lambda each: room.uploads.get("two", each),
        lambda each: room.uploads.part_writer("two", each),
        lambda each: room.uploads.cancel("two", each),
        lambda each: room.uploads.complete("two", each, part_ids=["part_0"]),
    ):
        said = []
        for each in (upload, never):
            with pytest.raises(UnknownName) as caught:
                await ask(each)
            said.append((caught.value.code, caught.value.message.replace(each, "ID")))
        assert said == [("unknown_upload", "No such Upload object: ID")] * 2
    assert (await room.uploads.get("one", upload)).status == "pending"


async def test_an_upload_has_limits(room):
    """An upload is no way around the largest file, a part has a largest size, and parts do not pile up without end."""
    assert await room.begin(1000)
    with pytest.raises(TooLarge):
        await room.begin(1001)
    upload = await room.begin(1000)
    writer = await room.uploads.part_writer("one", upload)
    await writer.write(bytes(PART_BYTES_MAX))
    with pytest.raises(TooLarge):
        await writer.write(b"x")
    await writer.discard()
    for _ in range(REPEATS_MAX):
        await room.part(upload, bytes(1000))
    await room.part(upload, bytes(PART_BYTES_MAX))
    with pytest.raises(TooLarge) as caught:
        await room.part(upload, b"x")
    assert caught.value.code == "too_many_parts"
    await room.uploads.cancel("one", upload)
    assert room.left() == []


async def test_a_caller_that_goes_away_while_parts_are_joined(room):
    """A completion that is cancelled goes on to its end: the upload is completed or untouched, never between."""
    for turns in range(0, 40, 3):
        upload = await room.begin(3)
        part = await room.part(upload, b"abc")
        task = asyncio.create_task(room.uploads.complete("one", upload, part_ids=[part]))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        record, file = await room.uploads.complete("one", upload, part_ids=[part])
        assert record.status == "completed" and await room.read(file) == b"abc"
    found, _ = await room.files.list("one")
    assert room.left() == sorted(file.id for file in found)
