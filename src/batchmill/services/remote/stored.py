"""Stored connectors and their models, as owners and commands exchange them. It knows no database."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from batchmill.types import Connector

REGISTERED, DEPLOYED, UNDEPLOYED = "REGISTERED", "DEPLOYED", "UNDEPLOYED"


class ConnectorRecord(Struct, frozen=True):
    """A stored connector. Its credentials are references to secrets in the vault."""

    id: str
    project: str
    connector: Connector
    access: dict[str, Any]  # fields that only a dialect reads
    revision: int  # starts at 1; each change adds one
    created: float
    changed: float


class RateLimiter(Struct, frozen=True):
    """How many calls of a model are allowed in a unit of time."""

    limit: float
    unit: str  # of Java's TimeUnit: SECONDS, MINUTES, HOURS, DAYS …


class ModelDetails(Struct, frozen=True, omit_defaults=True):
    """The fields of a model that have no column of their own."""

    description: str | None = None
    is_enabled: bool = True
    is_auto_deploy: bool | None = None  # None: the server's configuration decides
    rate_limiter: RateLimiter | None = None
    interface: dict[str, str] | None = None  # JSON schemas as text: `model_fields`
    deployed: float | None = None  # time of the last deployment
    undeployed: float | None = None


class RemoteModel(Struct, frozen=True):
    """A model whose calls go through a connector."""

    id: str
    project: str
    name: str
    group: str
    version: int  # within its group
    connector: str | None  # the id of a shared connector; None: `own`
    own: Connector | None
    state: str  # REGISTERED, DEPLOYED, UNDEPLOYED
    details: ModelDetails
    revision: int
    created: float
    changed: float

    @property
    def is_deployed(self) -> bool:
        return self.state == DEPLOYED
