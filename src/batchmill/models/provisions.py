"""What the owner gave this worker beside its model: secrets, and private hosts it may call. In memory only."""

from __future__ import annotations

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
