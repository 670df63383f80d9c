"""Secrets by reference: a spec has only a reference to a secret, and only the call that needs the secret reads it."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import redaction
from batchmill.models.addresses import Private, read_private
from batchmill.owner_term import ENDLESS, PrefixTerm
from batchmill.types import Isolation, ModelSpec, Provision
from batchmill.types.connectors import Storage


class _WorkerSecrets:
    """The provision of this process. A worker has only one engine."""

    def __init__(self) -> None:
        self.provision = Provision()
        self.private = Private()
        self.version = 0


_current = _WorkerSecrets()


def take(provision: Provision) -> None:
    """Replace the provision of this process."""
    for reference, secret in provision.secrets.items():
        if reference.startswith("secret:"):  # the value of a variable is learnt when it is used as a secret
            redaction.learn_named(reference.removeprefix("secret:"), secret)
    _current.private = read_private(provision.private_hosts)
    _current.provision = provision
    _current.version += 1


def secret(reference: str) -> str | None:
    """The value of "secret:NAME" or "env:NAME"; None if the owner provided none."""
    return _current.provision.secrets.get(reference)


def isolation() -> Isolation | None:
    """The sandbox of deployed code: of a function's process, and of classes that validate answers."""
    return _current.provision.isolation


def storage() -> Storage | None:
    """Where the objects of jobs are, if their owner has a store."""
    return _current.provision.storage


def private() -> Private:
    """The private hosts that connectors of callers may call besides the public internet."""
    return _current.private


def version() -> int:
    """A number that changes with each new provision. Callers that cache a secret must read it again then."""
    return _current.version


class NoSecrets:
    """A `ports.executors.Provisions` without secrets: a worker that needs one fails because it is missing."""

    storage_term = PrefixTerm(ENDLESS, math.inf)

    async def of(self, model: ModelSpec) -> Provision:
        return Provision()


KINDS = ("env:", "file:", "secret:")  # prefixes of references
LLM_TOKENS = "llm/"  # what the names of secrets begin with that come with a deployment or a job, and go with it
SECRET_BYTES_MAX = 16 * 1024
SHOWN_CHARS = 120
NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # secrets of connectors have other names: connector/ID/KEY


class Secret:
    """A secret in memory. Only `reveal` returns it; `repr` does not."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"


def resolve(reference: str, *, key: str = "") -> Secret:
    """Read the secret that "env:NAME", "file:PATH" or "secret:NAME" refers to.

    The owner provides a worker with the secrets ("secret:NAME") of its model. A server also provides the variables,
    which are not in the worker's environment.

    Args:
        key: the name of a connector's credential. A region, for example, is not masked in text.

    Raises: ModelFailed, with the name of the variable, file or secret that is missing, empty or not a single line of
    plain text.
    """
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        provided = secret(reference)
        value, location = os.environ.get(name) if provided is None else provided, f"the environment variable {name}"
    elif kind == "file" and name:
        value, location = _read(Path(name).expanduser()), f"the file {name}"
    elif kind == "secret" and name:
        value, location = secret(reference), f"the secret {name}"
        if value is None:
            raise missing(name)
    else:
        # Without the text, which may be the key itself.
        raise ModelFailed(
            'give a key as "env:NAME", "file:PATH" or "secret:NAME", never as its value', code="invalid_secret"
        )
    if value is None:
        raise ModelFailed(f"{location} has no key: it does not exist", code="missing_secret")
    value = value.strip()
    if not value:
        raise ModelFailed(f"{location} has no key: it is empty", code="missing_secret")
    if flaw := find_secret_flaw(value):
        raise ModelFailed(f"{location} has no key: {flaw}", code="invalid_secret")
    if key not in redaction.OPEN:
        redaction.learn(value)
    return Secret(value)


def find_secret_flaw(value: str) -> str:
    """Why a text cannot be a secret; empty if it can."""
    if not value:
        return "it is empty"
    if len(value) > SECRET_BYTES_MAX:
        return f"it is longer than {SECRET_BYTES_MAX:,} characters"
    return "" if value.isascii() and value.isprintable() else "it is not one line of plain text"


def check_name(name: str) -> str:
    """Check and return the name of a user's secret. Raises: InvalidInput."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"{name[:SHOWN_CHARS]!r} is not a name of a secret: it has 1 to 100 letters, digits and . _ -",
            code="invalid_secret_name",
        )
    return name


def missing(name: str) -> ModelFailed:
    """The error for a secret that is not stored."""
    reconfigure = (
        "give the deployment its token again" if name.startswith("llm/") else "give the connector its credential again"
    )
    way_out = f"batchmill secrets set {name}" if NAME.fullmatch(name) else reconfigure
    return ModelFailed(f"there is no secret {name[:SHOWN_CHARS]!r}: {way_out}", code="missing_secret")


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(SECRET_BYTES_MAX).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFailed(f"the file {path} cannot be read: {error.strerror}", code="missing_secret") from None
