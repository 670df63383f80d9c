"""Signed links: what they open, and each way in which one does not hold (any more)."""

from __future__ import annotations

import string

import pytest
from fakes.databases import open_database
from fakes.held_clock import HeldClock

from batchmill.errors import InvalidConfig, Refused
from batchmill.services import links
from batchmill.services.links import LinkService
from batchmill.services.secrets.box import SecretBox

PURPOSE, THING, HOUR_S = "the download of", "file-1", 3600.0


class Room:
    def __init__(self, folder) -> None:
        self.clock, self.box = HeldClock(), SecretBox(folder / "secrets.key")
        self.path = folder / "batchmill.db"
        self.open()

    def open(self) -> None:
        self.database = open_database(self.path)
        self.links = LinkService(self.database, self.clock, self.box)

    def sign(self, lifetime_s: float = HOUR_S) -> str:
        return self.links.sign(PURPOSE, THING, "one", lifetime_s)

    async def refused(self, signature: str, purpose: str = PURPOSE, subject: str = THING) -> str:
        """The code of the refusal."""
        with pytest.raises(Refused) as refusal:
            await self.links.open(signature, purpose, subject)
        return refusal.value.code


@pytest.fixture
def room(tmp_path):
    room = Room(tmp_path)
    yield room
    room.database.close()


async def test_a_link_says_whose_it_is(room):
    """A signature opens what it was given for, as often as it is asked, and fits into a query as it is."""
    signature = room.sign()
    assert signature.replace("-", "").replace("_", "").isalnum() and len(signature) < links.SIGNATURE_CHARS_MAX
    for _ in range(2):
        assert (await room.links.open(signature, PURPOSE, THING)).project == "one"


async def test_an_altered_link_is_refused(room):
    """A character changed, left out or added anywhere, another thing or purpose, or nothing at all: altered."""
    signature = room.sign()
    for at in range(0, len(signature), 7):
        changed = "A" if signature[at] != "A" else "B"
        assert await room.refused(signature[:at] + changed + signature[at + 1 :]) == "link_altered"
        assert await room.refused(signature[:at] + signature[at + 1 :]) == "link_altered"
    letters = string.ascii_letters + string.digits + "-_"
    for last in letters.replace(signature[-1], ""):
        assert await room.refused(signature[:-1] + last) == "link_altered"
    for other in ("", "=", "ü", "a b", "..", signature + "AAAA", signature[:-4]):
        assert await room.refused(other) == "link_altered"
    assert await room.refused(signature, subject="file-2") == "link_altered"
    assert await room.refused(signature, purpose="the upload of") == "link_altered"


async def test_an_expired_link_is_refused(room):
    """It holds until its very time has come."""
    signature = room.sign(10)
    await room.clock.sleep(9.5)
    await room.links.open(signature, PURPOSE, THING)
    await room.clock.sleep(0.5)
    assert await room.refused(signature) == "link_expired"


async def test_a_used_link_is_refused(room):
    """Used up once, or twice, it is refused, after a restart too; another link to the same thing is not."""
    signature, other = room.sign(), room.sign()
    link = await room.links.open(signature, PURPOSE, THING)
    await room.links.use_up(link)
    await room.links.use_up(link)
    assert await room.refused(signature) == "link_used"
    await room.links.open(other, PURPOSE, THING)
    room.database.close()
    room.open()
    assert await room.refused(signature) == "link_used"


async def test_a_link_whose_use_has_begun(room):
    """While what it is for is being sent it is refused; where that never arrived it holds again."""
    signature = room.sign()
    await room.links.begin_use(await room.links.open(signature, PURPOSE, THING))
    assert await room.refused(signature) == "link_used"
    await room.links.sweep()
    assert await room.refused(signature) == "link_used"
    await room.clock.sleep(links.SETTLE_S)
    await room.links.sweep()
    await room.links.use_up(await room.links.open(signature, PURPOSE, THING))
    assert await room.refused(signature) == "link_used"


async def test_of_several_who_opened_a_link_one_comes_to_the_end(room):
    """However many began before it was used: while the first one's end is under way, and after it has arrived."""
    signature = room.sign()
    first, second, third = [await room.links.open(signature, PURPOSE, THING) for _ in range(3)]
    await room.links.begin_use(first)
    with pytest.raises(Refused, match="works only once"):
        await room.links.begin_use(second)
    await room.links.use_up(first)
    await room.clock.sleep(links.SETTLE_S)
    with pytest.raises(Refused, match="works only once"):
        await room.links.begin_use(third)


async def test_of_two_who_use_a_link_one_is_first(room):
    """Within a transaction a link is used once; the second one's transaction does not come about."""
    link = await room.links.open(room.sign(), PURPOSE, THING)
    await room.database.write(room.links.use, link)
    with pytest.raises(Refused, match="works only once"):
        await room.database.write(room.links.use, link)


async def test_used_links_are_forgotten_once_they_have_expired(room):
    """What is remembered does not grow for ever, and nothing is forgotten that could still be used."""
    short, long = room.sign(10), room.sign(100)
    for signature in (short, long):
        await room.links.use_up(await room.links.open(signature, PURPOSE, THING))
    await room.clock.sleep(50)
    assert await room.links.sweep() == 1
    assert (await room.refused(short), await room.refused(long)) == ("link_expired", "link_used")


async def test_links_of_keys_that_are_gone(room):
    """A rotation of the server's keys ends the links before it, once the old keys are forgotten."""
    signature = room.sign()
    room.box.begin_rotation()
    await room.links.open(signature, PURPOSE, THING)
    room.box.end_rotation()
    assert await room.refused(signature) == "link_altered"


async def test_a_damaged_key_file_is_no_fault_of_the_link(room):
    """Nobody is told that a link was altered when the server cannot read its own keys."""
    signature = room.sign()
    room.box.path.write_text("no keys")
    room.links = LinkService(room.database, room.clock, SecretBox(room.box.path))
    with pytest.raises(InvalidConfig) as refusal:
        await room.links.open(signature, PURPOSE, THING)
    assert refusal.value.code != links.UNREADABLE


async def test_a_server_that_never_gave_a_link(room):
    """Without any keys there is none that could have been given."""
    assert await room.refused("AAAA") == "link_altered"
    assert not room.box.exists
