"""What batchmill's own API says of adapters."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

AdapterName = Annotated[str, Meta(min_length=1, max_length=200)]
Version = Annotated[int, Meta(ge=1, le=10**9)]


class NewAdapter(Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter to be fetched from where the server may: ORG/NAME of a model hub, s3://BUCKET/PREFIX, gs://, az://."""

    name: AdapterName
    base: AdapterName  # the model it is for
    source: Annotated[str, Meta(min_length=1, max_length=1000)]
    token: Annotated[str, Meta(min_length=1, max_length=200)] | None = None  # for a model hub: "secret:NAME"


class UploadQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which model an uploaded adapter is for."""

    base: AdapterName


class AdapterQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Only those for one model."""

    base: AdapterName | None = None


class AdapterVersion(Struct, frozen=True, forbid_unknown_fields=True):
    """Which version; absent: the newest that is ready, or of a removal all of them."""

    version: Version | None = None


class AdapterInfo(Struct, frozen=True):
    """A version of an adapter. Rows name it NAME/VERSION, or NAME for the newest that is ready."""

    name: str
    version: int
    base: str
    source: str
    state: str  # fetching, ready, failed
    message: str = ""  # why it failed
    digest: str = ""  # sha256 of its files
    rank: int = 0
    bytes: int = 0
    created: float = 0.0  # seconds since the epoch
    changed: float = 0.0
    trained_for: str = ""  # the base model, as its maker called it
    project: str = "default"

    @property
    def own_name(self) -> str:
        return f"{self.name}/{self.version}"


class AdapterList(Struct, frozen=True):
    adapters: list[AdapterInfo]
