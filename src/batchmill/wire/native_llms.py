"""What batchmill's own API and its clients say of deployed language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from batchmill.types import EngineEvent, Price
from batchmill.types.poison import Suspect
from batchmill.wire.native import Name

ARGS_MAX, ADAPTERS_MAX = 100, 1_000
TOKEN_CHARS_MAX, DESCRIPTION_CHARS_MAX = 16 * 1024, 4_096

Args = Annotated[dict[str, str | int | float | bool], Meta(max_length=ARGS_MAX)]
Token = Annotated[str, Meta(min_length=1, max_length=TOKEN_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=DESCRIPTION_CHARS_MAX)]
Adapters = Annotated[list[Name], Meta(max_length=ADAPTERS_MAX)]


class NewLlm(Struct, frozen=True, forbid_unknown_fields=True):
    """A language model that batchmill is to serve. What is absent is as its base model has it."""

    name: Name
    base_model: Name  # of the configuration, or an id of a model hub that it allows
    engine_args: Args = {}
    hf_token: Token | None = None  # shown to the model hub; kept encrypted, and told to nobody
    replicas_min: int | None = None  # that stay whether anybody uses them or not
    replicas_max: int | None = None
    cooldown_s: float | None = None  # a replica that is idle goes after so long
    scale_up_requests: int | None = None  # another one starts above so many requests a replica
    memory_bytes: int | None = None  # what one replica takes of the machine
    gpus: int | None = None
    takes_adapters: bool = True
    preloaded_adapters: Adapters = []
    description: Text | None = None

    def __repr__(self) -> str:  # it may hold a token
        return f"NewLlm({self.name})"


class LlmChange(Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be changed of a deployment. What is absent stays; null is as the base model has it."""

    base_model: Name | UnsetType = UNSET
    engine_args: Args | UnsetType = UNSET  # all of them
    hf_token: Token | None | UnsetType = UNSET  # null: none any more
    replicas_min: int | None | UnsetType = UNSET
    replicas_max: int | None | UnsetType = UNSET
    cooldown_s: float | None | UnsetType = UNSET
    scale_up_requests: int | None | UnsetType = UNSET
    memory_bytes: int | None | UnsetType = UNSET
    gpus: int | None | UnsetType = UNSET
    takes_adapters: bool | UnsetType = UNSET
    preloaded_adapters: Adapters | UnsetType = UNSET
    description: Text | None | UnsetType = UNSET

    def __repr__(self) -> str:
        return "LlmChange()"


class LlmInfo(Struct, frozen=True):
    """A deployed language model, and how its engine is."""

    id: str
    name: str
    base_model: str
    state: str  # stopped, waiting, starting, ready, failed, stopping: of all replicas together
    replicas: int  # that run or start
    ready: int
    wanted: int
    message: str  # why it waits, has failed, or was not changed
    engine_args: dict[str, Any]
    has_hf_token: bool
    replicas_min: int
    replicas_max: int
    cooldown_s: float | None
    scale_up_requests: int | None
    memory_bytes: int
    gpus: int
    takes_adapters: bool
    preloaded_adapters: list[str]
    adapters: list[str]  # names that rows and requests may use
    price: Price | None
    description: str | None
    is_configured: bool  # by batchmill.toml: it cannot be changed here
    is_stopped: bool  # it answers nothing until it is started
    is_updating: bool  # what was there before answers until the new engine is ready
    created: float
    changed: float


class LlmList(Struct, frozen=True):
    llms: list[LlmInfo]
    base_models: list[str]  # names that may be deployed, besides ids of a model hub


class LlmEvents(Struct, frozen=True):
    """What became of a deployment lately, the oldest first."""

    events: list[EngineEvent]


class LlmEventsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    after: float | None = None  # seconds since the epoch: only what came later


class QuarantinedRequest(Struct, frozen=True):
    """A request that was alone in flight when an engine died."""

    digest: str
    model: str  # the base model
    project: str
    url: str
    deaths: int
    is_refused: bool  # otherwise it runs alone
    at: float  # seconds since the epoch: the last of the deaths


class QuarantinedRequests(Struct, frozen=True):
    requests: list[QuarantinedRequest]

    @classmethod
    def of(cls, suspects: Sequence[Suspect]) -> QuarantinedRequests:
        return cls(
            [
                QuarantinedRequest(
                    each.digest, each.model, each.project, each.url, each.deaths, each.is_refused, each.at
                )
                for each in suspects
            ]
        )
