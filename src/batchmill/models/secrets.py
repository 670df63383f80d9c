"""Keys by reference: a spec says where a secret lies, and only the call that needs it reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import redaction
from batchmill.models.addresses import Private, read_private
from batchmill.types import Isolation, ModelSpec, Provision


class _Held:
    """One for a process: a worker hosts one engine."""

    def __init__(self) -> None:
        self.provision = Provision()
        self.private = Private()
        self.version = 0


_held = _Held()


def take(provision: Provision) -> None:
    """Use this from now on instead of what was given before."""
    for reference, secret in provision.secrets.items():
        if reference.startswith("secret:"):  # a variable's value is learnt where it is used as a secret
            redaction.learn_named(reference.removeprefix("secret:"), secret)
    _held.private = read_private(provision.private_hosts)
    _held.provision = provision
    _held.version += 1


def secret(reference: str) -> str | None:
    """What "secret:NAME" or "env:NAME" stands for; None where the owner gave no such secret."""
    return _held.provision.secrets.get(reference)


def isolation() -> Isolation | None:
    """How the function's process is kept from the machine."""
    return _held.provision.isolation


def private() -> Private:
    """Where calls of a connector that is not trusted may go besides the public internet."""
    return _held.private


def version() -> int:
    """Another number once secrets have changed: whoever keeps one asks for it anew."""
    return _held.version


class NothingProvided:
    """As `ports.Provisions` where no secrets are kept: a worker that needs one says that it is missing."""

    async def of(self, model: ModelSpec) -> Provision:
        return Provision()


KINDS = ("env:", "file:", "secret:")  # how a reference begins
SECRET_BYTES_MAX = 16 * 1024
SHOWN_CHARS = 120
NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # those of connectors are connector/ID/KEY


class Secret:
    """A key in memory. It shows itself to nobody who does not ask with `reveal`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"


def resolve(reference: str, *, key: str = "") -> Secret:
    """The secret that "env:NAME", "file:PATH" or "secret:NAME" refers to.

    The last are those that the owner keeps; a worker has been given what its model names (`provisions`), and one of a
    server the variables too, which are not in its own environment.

    Args:
        key: what a connector calls it: a region is used like a secret, and taken out of no text.

    Raises: ModelFailed, naming the variable, file or secret that is missing, empty or no single line of plain text.
    """
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        given = secret(reference)
        value, place = os.environ.get(name) if given is None else given, f"the environment variable {name}"
    elif kind == "file" and name:
        value, place = _read(Path(name).expanduser()), f"the file {name}"
    elif kind == "secret" and name:
        value, place = secret(reference), f"the secret {name}"
        if value is None:
            raise missing(name)
    else:
        # The text itself may be a key somebody pasted: it is not repeated.
        raise ModelFailed(
            'a key is given as "env:NAME", "file:PATH" or "secret:NAME", never as itself', code="invalid_secret"
        )
    if value is None:
        raise ModelFailed(f"{place} holds no key: it does not exist", code="missing_secret")
    value = value.strip()
    if not value:
        raise ModelFailed(f"{place} holds no key: it is empty", code="missing_secret")
    if flaw := flaw_of(value):
        raise ModelFailed(f"{place} holds no key: {flaw}", code="invalid_secret")
    if key not in redaction.OPEN:
        redaction.learn(value)
    return Secret(value)


def flaw_of(value: str) -> str:
    """Why a text is no secret that could be used; empty: it is one."""
    if not value:
        return "it is empty"
    if len(value) > SECRET_BYTES_MAX:
        return f"it is longer than {SECRET_BYTES_MAX:,} characters"
    return "" if value.isascii() and value.isprintable() else "it is not one line of plain text"


def check_name(name: str) -> str:
    """The name of a secret that people give. Raises: InvalidInput."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"{name[:SHOWN_CHARS]!r} is no name of a secret: it is 1 to 100 letters, digits and . _ -",
            code="invalid_secret_name",
        )
    return name


def missing(name: str) -> ModelFailed:
    """What is raised where a secret is not kept."""
    again = (
        "give the deployment its token again" if name.startswith("llm/") else "give the connector its credential again"
    )
    way = f"batchmill secrets set {name}" if NAME.fullmatch(name) else again
    return ModelFailed(f"there is no secret {name[:SHOWN_CHARS]!r}: {way}", code="missing_secret")


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(SECRET_BYTES_MAX).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFailed(f"the file {path} cannot be read: {error.strerror}", code="missing_secret") from None
