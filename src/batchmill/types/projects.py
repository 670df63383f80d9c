"""Projects: who calls on behalf of one, and how much it may have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidConfig
from batchmill.types.machines import size_of


class Scope(StrEnum):
    """What a key may be used for. Each holds those before it."""

    READ = "read"  # look at files, jobs, results and models
    SUBMIT = "submit"  # upload, run, steer one's own jobs, call models
    ADMIN = "admin"  # keys, webhooks, and everything of every project's server
    DEPLOY = "deploy"  # bring code that runs as the server's user: only who runs the machine makes such a key


class Caller(Struct, frozen=True):
    """Who is asking: a project by one of its keys, or anybody on this machine where there are no keys."""

    project: str
    scope: Scope
    key: str | None = None  # its public id
    models: frozenset[str] | None = None  # names it may use; None: all that the project may
    requests_per_minute: int | None = None
    # Public ids of the keys that minted its own, and their rates, the first of them first: they pay for it too.
    minted_by: tuple[tuple[str, int | None], ...] = ()
    expires: float | None = None  # when its key ends; None: never

    @property
    def in_words(self) -> str:
        """Who it is, for those who ask later what became of something."""
        return "somebody without a key" if self.key is None else f"the key {self.key}"

    def may(self, scope: Scope) -> bool:
        order = list(Scope)
        return order.index(self.scope) >= order.index(scope)


QUOTA_MAX = 10**9
SHOWN_CHARS = 40  # of a value that is refused
_SHARE = re.compile(r"(\d{1,3})%")


class Quotas(Struct, frozen=True):
    """`[quotas]`: of each project. `[projects.NAME.quotas]` has other numbers for one of them."""

    keys: int = 1_000  # that are valid
    secrets: int = 2_000  # credentials of its connectors and tokens of its deployments
    connectors: int = 1_000
    remote_models: int = 1_000
    model_groups: int = 1_000
    remote_tasks: int = 10_000
    unfinished_jobs: int = 2_000
    files: int = 100_000  # uploaded; results come with their jobs
    uploads: int = 1_000  # in parts, that have not ended
    datasets: int = 10_000
    adapters: int = 10_000  # all versions
    llm_deployments: int = 100
    functions: int = 1_000  # all versions, failed ones too
    webhook_endpoints: int = 100
    late_calls: int = 2_000  # to be answered later
    used_links: int = 100_000  # that have not expired
    disk: int | str = "80%"  # bytes, "500GiB", or a share of the file system that the data directory lies on

    def disk_bytes(self, total: int) -> int:
        """What `disk` comes to on a file system of this size."""
        share = _SHARE.fullmatch(str(self.disk))
        return size_of(self.disk) if share is None else total * int(share[1]) // 100

    def check(self, place: str) -> None:
        """Raises: InvalidConfig for a value out of range."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "disk":
                share = _SHARE.fullmatch(str(value))
                if share is None:
                    size_of(value, f'{place}.disk, if it is no share like "80%",')
                elif not 1 <= int(share[1]) <= 100:
                    raise InvalidConfig(f"{place}.disk must be 1% to 100%, not {value}")
            elif not 0 <= value <= QUOTA_MAX:
                raise InvalidConfig(f"{place}.{name} must be 0 to {QUOTA_MAX:,}, not {str(value)[:SHOWN_CHARS]}")

    def with_own(self, own: Mapping[str, int | str], place: str) -> Quotas:
        """These, with a project's own in the place of some. Raises: InvalidConfig."""
        fields = msgspec.structs.asdict(self) | dict(own)
        try:
            return msgspec.convert(fields, Quotas)
        except msgspec.ValidationError as error:
            raise InvalidConfig(f"{place}: {error}") from None


class ProjectQuotas(Struct, frozen=True):
    """The quotas of every project."""

    each: Quotas = Quotas()
    own: dict[str, Quotas] = {}

    @classmethod
    def read(cls, each: Quotas, own: Mapping[str, Mapping[str, int | str]]) -> ProjectQuotas:
        """Those of all, and by project what some have in their place. Raises: InvalidConfig."""
        each.check("quotas")
        found = {}
        for name, limit in own.items():
            if limit:
                place = f"projects.{name}.quotas"
                found[name] = each.with_own(limit, place)
                found[name].check(place)
        return cls(each, found)

    def of(self, project: str) -> Quotas:
        return self.own.get(project, self.each)
