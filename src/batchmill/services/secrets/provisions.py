"""What the workers of a model are given beside it: those secrets that it names, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from batchmill.errors import InvalidConfig, ModelFailed
from batchmill.models.addresses import read_private
from batchmill.models.providers import key_meant
from batchmill.services.secrets.vault import Vault
from batchmill.types import Isolation, ModelSpec, Provision

PREFIX, VARIABLE = "secret:", "env:"


class OwnerProvisions:
    """`ports.Provisions` of the process that owns the secrets.

    Args:
        environ: where "env:NAME" is looked up for workers, whose own environment does not have it; None: it has.
    """

    def __init__(
        self, vault: Vault, private_hosts: Sequence[str], environ: Mapping[str, str] | None = None,
        isolation: Isolation | None = None,
    ) -> None:  # fmt: skip
        """Raises: InvalidConfig for a host that cannot be one."""
        read_private(private_hosts)
        self._vault, self._private_hosts, self._environ = vault, list(private_hosts), environ or {}
        self.isolation = isolation

    async def of(self, model: ModelSpec) -> Provision:
        """For a worker of this model. Raises: ModelFailed, naming the secret that is missing or cannot be read."""
        told = references(model)
        names = [each.removeprefix(PREFIX) for each in told if each.startswith(PREFIX)]
        try:
            found = await self._vault.reveal_all(names)
        except InvalidConfig as error:
            raise ModelFailed(error.message, code="missing_secret") from None
        given = {PREFIX + name: value for name, value in found.items()}
        for each in told:
            name = each.removeprefix(VARIABLE)
            if name != each and name in self._environ:  # the worker says so where it is missing
                given[each] = self._environ[name]
        isolation = self.isolation if model.engine == "function_process" else None
        return Provision(given, self._private_hosts, isolation)


def references(model: ModelSpec) -> list[str]:
    """Every "secret:NAME" and "env:NAME" that a model names, or means where it names no key; of routes that are still
    to be chosen from, all of theirs."""
    told = (value for value in _values(model) if isinstance(value, str) and value.startswith((PREFIX, VARIABLE)))
    return list(dict.fromkeys(told))


def _values(model: ModelSpec) -> Iterator[object]:
    key = model.api_key or key_meant(model)
    places: list[Iterable[object]] = [(key,), model.engine_args.values(), model.secrets.values()]
    if model.connector is not None:
        places.append(model.connector.credential.values())
    if model.function is not None:
        places.append(model.function.secrets.values())
    for each in places:
        yield from each
    for route in model.routes if model.engine == "routes" else ():
        yield from _values(route)
