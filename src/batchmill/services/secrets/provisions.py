"""What the workers of a model are given beside it: those secrets that it names, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from batchmill.errors import InvalidConfig, ModelFailed
from batchmill.models.addresses import read_private
from batchmill.services.secrets.vault import Vault
from batchmill.types import ModelSpec, Provision

PREFIX = "secret:"


class OwnerProvisions:
    """`ports.Provisions` of the process that owns the secrets."""

    def __init__(self, vault: Vault, private_hosts: Sequence[str]) -> None:
        """Raises: InvalidConfig for a host that cannot be one."""
        read_private(private_hosts)
        self._vault, self._private_hosts = vault, list(private_hosts)

    async def of(self, model: ModelSpec) -> Provision:
        """For a worker of this model. Raises: ModelFailed, naming the secret that is missing or cannot be read."""
        names = [reference.removeprefix(PREFIX) for reference in references(model)]
        try:
            found = await self._vault.reveal_all(names)
        except InvalidConfig as error:
            raise ModelFailed(error.message, code="missing_secret") from None
        return Provision({PREFIX + name: value for name, value in found.items()}, self._private_hosts)


def references(model: ModelSpec) -> list[str]:
    """Every "secret:NAME" that a model names; of routes that are still to be chosen from, all of theirs."""
    told = (value for value in _values(model) if isinstance(value, str) and value.startswith(PREFIX))
    return list(dict.fromkeys(told))


def _values(model: ModelSpec) -> Iterator[object]:
    places: list[Iterable[object]] = [(model.api_key,), model.engine_args.values(), model.secrets.values()]
    if model.connector is not None:
        places.append(model.connector.credential.values())
    if model.function is not None:
        places.append(model.function.secrets.values())
    for each in places:
        yield from each
    for route in model.routes if model.engine == "routes" else ():
        yield from _values(route)
