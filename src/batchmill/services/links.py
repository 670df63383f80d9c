"""Signed links. A link allows one action on one object of one project until it expires; some links work only once.

The server's `SecretBox` seals a signature for its purpose and object, so that an altered or moved signature cannot be
opened. The use of a one-time link is stored in the database; after that the link is refused.
"""

from __future__ import annotations

import base64
import binascii
import secrets

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import InvalidConfig, Refused
from batchmill.ports.clock import Clock
from batchmill.services.secrets.box import SecretBox
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.portable import insert_missing
from batchmill.store.sql.tables import used_links
from batchmill.types import ProjectQuotas

SIGNATURE_CHARS_MAX = 1024
SETTLE_S = 20.0  # after so long it is known whether the reply has arrived
SWEEP_MAX = 10_000  # used links that one sweep deletes
UNREADABLE = "secret_unreadable"  # SecretBox: sealed for something else, or by another server


class SignedLink(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a signature. Times are seconds since the epoch, UTC."""

    id: str
    project: str
    expires: float


class LinkService:
    """Raises, everywhere: Refused (`link_altered`, `link_expired`, `link_used`)."""

    def __init__(
        self, database: Database, clock: Clock, box: SecretBox, quotas: ProjectQuotas = ProjectQuotas()
    ) -> None:
        self._database, self._clock, self._box, self._quotas = database, clock, box, quotas
        self._in_use: dict[str, float] = {}  # links in use -> until when, monotonic

    def sign(self, purpose: str, subject: str, project: str, lifetime_s: float) -> str:
        """Return a signature that needs no quoting in a query string."""
        link = SignedLink(secrets.token_hex(16), project, self._clock.now() + lifetime_s)
        sealed = self._box.seal(msgspec.json.encode(link), _owner(purpose, subject))
        return _text(sealed)

    async def open(self, signature: str, purpose: str, subject: str) -> SignedLink:
        """Return the link in a signature, checked for this purpose and object."""
        link = self._read(signature, _owner(purpose, subject))
        if link.expires <= self._clock.now():
            raise Refused("this link has expired: ask for a new one", code="link_expired")
        await self._check_free(link)
        return link

    async def begin_use(self, link: SignedLink) -> None:
        """Reserve a link while the end of its reply is sent. It is refused for now, and for good after `use_up`.

        Raises: Refused if another request uses it already; OverQuota.
        """
        await self._database.read(_refuse_beyond, link, self._quotas.of(link.project).used_links)
        await self._check_free(link)
        self._in_use[link.id] = self._clock.monotonic() + SETTLE_S

    async def use_up(self, link: SignedLink) -> None:
        """Refuse the link from now on. Idempotent."""
        await self._database.write(_insert_used, link)

    def use(self, db: sa.Connection, link: SignedLink) -> None:
        """Use a link up, in the transaction of the action that it allows.

        Raises: Refused if it was used before; OverQuota.
        """
        check_unused(db, link)
        _refuse_beyond(db, link, self._quotas.of(link.project).used_links)
        _insert_used(db, link)

    async def sweep(self) -> int:
        """Delete used links that have expired. Returns how many."""
        now = self._clock.monotonic()
        self._in_use = {name: until for name, until in self._in_use.items() if until > now}
        return await self._database.write(_delete_expired, self._clock.now())

    async def _check_free(self, link: SignedLink) -> None:
        """Check that the link is neither used nor in use. Holds until the caller's next `await`. Raises: Refused."""
        await self._database.read(check_unused, link)
        if self._in_use.get(link.id, 0.0) > self._clock.monotonic():
            raise _used_error()

    def _read(self, signature: str, owner: str) -> SignedLink:
        try:
            sealed = base64.b64decode(signature + "=" * (-len(signature) % 4), b"-_", validate=True)
            if _text(sealed) == signature:  # reject other encodings of the same bytes
                return msgspec.json.decode(self._box.open(sealed, owner), type=SignedLink)
        except InvalidConfig as error:
            if error.code != UNREADABLE:
                raise  # a problem of the server's key file
        except (binascii.Error, ValueError, msgspec.MsgspecError):
            pass  # not a signature of this server
        raise Refused(
            "this link was altered, or was signed by another server or with another key: ask for a new one",
            code="link_altered",
        ) from None


def check_unused(db: sa.Connection, link: SignedLink) -> None:
    """Raises: Refused."""
    if db.execute(sa.select(used_links.c.id).where(used_links.c.id == link.id)).first() is not None:
        raise _used_error()


def _refuse_beyond(db: sa.Connection, link: SignedLink, limit: int) -> None:
    """Raises: OverQuota if the project has too many used links. They are stored until they expire."""
    way_out = "try again when some of them have expired"
    refuse_beyond(db, used_links, limit, quota="used_links", project=link.project, way_out=way_out)


def _used_error() -> Refused:
    return Refused("this link has been used, and works only once: ask for a new one", code="link_used")


def _insert_used(db: sa.Connection, link: SignedLink) -> None:
    insert_missing(db, used_links, {"id": link.id, "expires": link.expires, "project": link.project})


def _delete_expired(db: sa.Connection, now: float) -> int:
    expired = sa.select(used_links.c.id).where(used_links.c.expires <= now).limit(SWEEP_MAX)
    return db.execute(used_links.delete().where(used_links.c.id.in_(expired))).rowcount


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).decode().rstrip("=")


def _owner(purpose: str, subject: str) -> str:
    return f"the link to {purpose} {subject}"
