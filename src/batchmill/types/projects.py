"""Projects: their callers and their quotas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidConfig
from batchmill.types.machines import size_of


class Scope(StrEnum):
    """What a key may be used for. Each scope includes those before it."""

    READ = "read"  # read files, jobs, results and models
    SUBMIT = "submit"  # upload files, run and control jobs, call models
    ADMIN = "admin"  # keys, webhooks, and everything of every project's server
    DEPLOY = "deploy"  # deploy code that runs as the server's user: only the operator can create such a key


class Caller(Struct, frozen=True):
    """The caller of a request: a key of a project, or anybody on this machine if there are no keys."""

    project: str
    scope: Scope
    key: str | None = None  # its public id
    models: frozenset[str] | None = None  # names that it may use; None: all of the project
    requests_per_minute: int | None = None
    # Public ids and rates of the keys that minted its key, the first one first: requests count against them too.
    minted_by: tuple[tuple[str, int | None], ...] = ()
    expires: float | None = None  # when its key ends; None: never

    @property
    def in_words(self) -> str:
        """Return a description of the caller, to record who did something."""
        return "somebody without a key" if self.key is None else f"the key {self.key}"

    def may(self, scope: Scope) -> bool:
        order = list(Scope)
        return order.index(self.scope) >= order.index(scope)


QUOTA_MAX = 10**9
SHOWN_CHARS = 40  # of an invalid value, in a message
_SHARE = re.compile(r"(\d{1,3})%")


class Quotas(Struct, frozen=True):
    """`[quotas]`: the quotas of each project. `[projects.NAME.quotas]` overrides them for one project."""

    keys: int = 1_000  # valid ones
    secrets: int = 2_000  # credentials of its connectors and tokens of its deployments
    connectors: int = 1_000
    remote_models: int = 1_000
    model_groups: int = 1_000
    remote_tasks: int = 10_000
    unfinished_jobs: int = 2_000
    files: int = 100_000  # uploaded files, without results of jobs
    uploads: int = 1_000  # pending uploads in parts
    datasets: int = 10_000
    adapters: int = 10_000  # all versions
    llm_deployments: int = 100
    functions: int = 1_000  # all versions, failed ones too
    webhook_endpoints: int = 100
    late_calls: int = 2_000  # calls that are answered later
    used_links: int = 100_000  # used links that have not expired
    disk: int | str = "80%"  # bytes, "500GiB", or a share of the data directory's file system

    def disk_bytes(self, total: int) -> int:
        """Return `disk` in bytes, for a file system of this size."""
        share = _SHARE.fullmatch(str(self.disk))
        return size_of(self.disk) if share is None else total * int(share[1]) // 100

    def check(self, path: str) -> None:
        """Raises: InvalidConfig for a value out of range."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "disk":
                share = _SHARE.fullmatch(str(value))
                if share is None:
                    size_of(value, f'{path}.disk, if it is not a share like "80%",')
                elif not 1 <= int(share[1]) <= 100:
                    raise InvalidConfig(f"{path}.disk must be 1% to 100%, not {value}")
            elif not 0 <= value <= QUOTA_MAX:
                raise InvalidConfig(f"{path}.{name} must be 0 to {QUOTA_MAX:,}, not {str(value)[:SHOWN_CHARS]}")

    def with_overrides(self, own: Mapping[str, int | str], path: str) -> Quotas:
        """Return these quotas with those of a project replaced. Raises: InvalidConfig."""
        fields = msgspec.structs.asdict(self) | dict(own)
        try:
            return msgspec.convert(fields, Quotas)
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"{path}: {error}") from None


class ProjectQuotas(Struct, frozen=True):
    """The quotas of every project."""

    each: Quotas = Quotas()
    own: dict[str, Quotas] = {}

    @classmethod
    def read(cls, each: Quotas, own: Mapping[str, Mapping[str, int | str]]) -> ProjectQuotas:
        """Read the general quotas and the overrides of projects. Raises: InvalidConfig."""
        each.check("quotas")
        quotas = {}
        for name, limit in own.items():
            if limit:
                path = f"projects.{name}.quotas"
                quotas[name] = each.with_overrides(limit, path)
                quotas[name].check(path)
        return cls(each, quotas)

    def of(self, project: str) -> Quotas:
        return self.own.get(project, self.each)
