"""Links that say themselves what they allow: signed, for one thing of one project, until a time; some work only once.

A signature is sealed by the server's box for the purpose and the thing it is for: altered, or put behind another
address, it cannot be opened. A link that works once is written down when it has been used, and then refused.
"""

from __future__ import annotations

import base64
import binascii
import secrets

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import InvalidConfig, Refused
from batchmill.ports import Clock
from batchmill.services.secrets.box import SecretBox
from batchmill.store.database import Database
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import used_links
from batchmill.types import ProjectQuotas

SIGNATURE_CHARS_MAX = 1024
SETTLE_S = 20.0  # after which it is known whether something that was sent has arrived
SWEEP_MAX = 10_000  # used links that are forgotten at once
UNREADABLE = "secret_unreadable"  # SecretBox: it was sealed for something else, or by another server


class SignedLink(Struct, frozen=True, forbid_unknown_fields=True):
    """What a signature holds. Times are seconds since the epoch, UTC."""

    id: str
    project: str
    expires: float


class LinkService:
    """Raises, everywhere: Refused (`link_altered`, `link_expired`, `link_used`)."""

    def __init__(
        self, database: Database, clock: Clock, box: SecretBox, quotas: ProjectQuotas = ProjectQuotas()
    ) -> None:
        self._database, self._clock, self._box, self._quotas = database, clock, box, quotas
        self._sent: dict[str, float] = {}  # links under way to being used up -> until when, monotonic

    def sign(self, purpose: str, subject: str, project: str, lifetime_s: float) -> str:
        """A signature that fits into a query as it is."""
        link = SignedLink(secrets.token_hex(16), project, self._clock.now() + lifetime_s)
        sealed = self._box.seal(msgspec.json.encode(link), _owner(purpose, subject))
        return _text(sealed)

    async def open(self, signature: str, purpose: str, subject: str) -> SignedLink:
        """The link that a signature is, of this purpose and this very thing."""
        link = self._read(signature, _owner(purpose, subject))
        if link.expires <= self._clock.now():
            raise Refused("this link has expired: ask for a new one", code="link_expired")
        await self._check_free(link)
        return link

    async def begin_use(self, link: SignedLink) -> None:
        """The end of what it is for is being sent: it is refused for now, and for good once `use_up` is called.

        Raises: Refused, when somebody who had opened it as well was first; OverQuota.
        """
        await self._database.read(_refuse_beyond, link, self._quotas.of(link.project).used_links)
        await self._check_free(link)
        self._sent[link.id] = self._clock.monotonic() + SETTLE_S

    async def use_up(self, link: SignedLink) -> None:
        """From now on it is refused; done twice, it is once."""
        await self._database.write(_note, link)

    def use(self, db: sa.Connection, link: SignedLink) -> None:
        """Use a link up, within the transaction of what it was used for.

        Raises: Refused, when somebody was first; OverQuota.
        """
        check_unused(db, link)
        _refuse_beyond(db, link, self._quotas.of(link.project).used_links)
        _note(db, link)

    async def sweep(self) -> int:
        """Forget the used links that have expired; returns how many."""
        now = self._clock.monotonic()
        self._sent = {name: until for name, until in self._sent.items() if until > now}
        return await self._database.write(_forget, self._clock.now())

    async def _check_free(self, link: SignedLink) -> None:
        """Nobody has used it, or is about to. What follows at once, without waiting, is the first to know."""
        await self._database.read(check_unused, link)
        if self._sent.get(link.id, 0.0) > self._clock.monotonic():
            raise _used()

    def _read(self, signature: str, owner: str) -> SignedLink:
        try:
            sealed = base64.b64decode(signature + "=" * (-len(signature) % 4), b"-_", validate=True)
            if _text(sealed) == signature:  # there is one way to write it: bits that say nothing are not to be changed
                return msgspec.json.decode(self._box.open(sealed, owner), type=SignedLink)
        except InvalidConfig as error:
            if error.code != UNREADABLE:
                raise  # the server's key file itself
        except (binascii.Error, ValueError, msgspec.MsgspecError):
            pass  # no signature of ours has such a form
        raise Refused(
            "this link was altered, or was not given by this server with the keys it has now: ask for a new one",
            code="link_altered",
        ) from None


def check_unused(db: sa.Connection, link: SignedLink) -> None:
    """Raises: Refused."""
    if db.execute(sa.select(used_links.c.id).where(used_links.c.id == link.id)).first() is not None:
        raise _used()


def _refuse_beyond(db: sa.Connection, link: SignedLink, most: int) -> None:
    """Links that were used are remembered until they expire."""
    way_out = "come again when some of them have expired"
    refuse_beyond(db, used_links, most, quota="used_links", project=link.project, way_out=way_out)


def _used() -> Refused:
    return Refused("this link has been used, and works only once: ask for a new one", code="link_used")


def _note(db: sa.Connection, link: SignedLink) -> None:
    db.execute(
        used_links.insert().prefix_with("OR IGNORE").values(id=link.id, expires=link.expires, project=link.project)
    )


def _forget(db: sa.Connection, now: float) -> int:
    some = sa.select(used_links.c.id).where(used_links.c.expires <= now).limit(SWEEP_MAX)
    return db.execute(used_links.delete().where(used_links.c.id.in_(some))).rowcount


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).decode().rstrip("=")


def _owner(purpose: str, subject: str) -> str:
    return f"the link to {purpose} {subject}"
