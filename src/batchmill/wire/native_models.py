"""The structs for models in batchmill's own API: adapters, deployed language models, and logs of functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from batchmill.types import EngineEvent, Price
from batchmill.types.models import Suspect
from batchmill.wire.native import Name

AdapterName = Annotated[str, Meta(min_length=1, max_length=200)]
Version = Annotated[int, Meta(ge=1, le=10**9)]


class NewAdapter(Struct, frozen=True, forbid_unknown_fields=True):
    """A request to fetch an adapter from an allowed source: ORG/NAME of a model hub, s3://BUCKET/PREFIX, gs://, az://."""

    name: AdapterName
    base: AdapterName  # the model it is for
    source: Annotated[str, Meta(min_length=1, max_length=1000)]
    token: Annotated[str, Meta(min_length=1, max_length=200)] | None = None  # for a model hub: "secret:NAME"


class UploadQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which model an uploaded adapter is for."""

    base: AdapterName


class AdapterQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Filters adapters by their base model."""

    base: AdapterName | None = None


class AdapterVersion(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects a version; absent: the newest ready one, or for a removal all of them."""

    version: Version | None = None


class AdapterInfo(Struct, frozen=True):
    """A version of an adapter. Rows name it NAME/VERSION, or NAME for the newest ready version."""

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
    trained_for: str = ""  # the base model that the adapter's configuration names
    project: str = "default"

    @property
    def own_name(self) -> str:
        return f"{self.name}/{self.version}"


class AdapterList(Struct, frozen=True):
    adapters: list[AdapterInfo]


ARGS_MAX, ADAPTERS_MAX = 100, 1_000
TOKEN_CHARS_MAX, DESCRIPTION_CHARS_MAX = 16 * 1024, 4_096

Args = Annotated[dict[str, str | int | float | bool], Meta(max_length=ARGS_MAX)]
Token = Annotated[str, Meta(min_length=1, max_length=TOKEN_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=DESCRIPTION_CHARS_MAX)]
Adapters = Annotated[list[Name], Meta(max_length=ADAPTERS_MAX)]


class NewLlm(Struct, frozen=True, forbid_unknown_fields=True):
    """A language model to deploy. Omitted settings come from the base model."""

    name: Name
    base_model: Name  # a model of the configuration, or an id of a model hub that it allows
    engine_args: Args = {}
    hf_token: Token | None = None  # sent to the model hub; stored encrypted, and never shown
    replicas_min: int | None = None  # replicas that stay even without requests
    replicas_max: int | None = None
    cooldown_s: float | None = None  # an idle replica stops after this time
    scale_up_requests: int | None = None  # another replica starts above this number of requests for each replica
    memory_bytes: int | None = None  # of the machine's memory, for one replica
    gpus: int | None = None
    takes_adapters: bool = True
    preloaded_adapters: Adapters = []
    description: Text | None = None

    def __repr__(self) -> str:  # it may hold a token
        return f"NewLlm({self.name})"


class LlmChange(Struct, frozen=True, forbid_unknown_fields=True):
    """A change of a deployment. Omitted settings are unchanged; null restores the base model's setting."""

    base_model: Name | UnsetType = UNSET
    engine_args: Args | UnsetType = UNSET  # replaces all of them
    hf_token: Token | None | UnsetType = UNSET  # null: remove it
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
    """A deployed language model, and the state of its engine."""

    id: str
    name: str
    base_model: str
    state: str  # stopped, waiting, starting, ready, failed, stopping: of all replicas together
    replicas: int  # running or starting
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
    is_configured: bool  # in batchmill.toml: the API cannot change it
    is_stopped: bool  # it answers no requests until it is started
    is_updating: bool  # the old engine answers until the new one is ready
    created: float
    changed: float


class LlmList(Struct, frozen=True):
    llms: list[LlmInfo]
    base_models: list[str]  # names that may be deployed, besides ids of a model hub


class LlmEvents(Struct, frozen=True):
    """The recent events of a deployment, the oldest first."""

    events: list[EngineEvent]


class LlmEventsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    after: float | None = None  # seconds since the epoch: only later events


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


LIMIT_DEFAULT, LIMIT_MAX = 1000, 10_000

LogText = Annotated[str, Meta(min_length=1, max_length=200)]


class LogQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Selects log lines of versions; without `after`, the last ones."""

    branch: LogText | None = None
    version: LogText | None = None
    request: (
        Annotated[str, Meta(min_length=1, max_length=200, description="The id of a request, or of a job")] | None
    ) = None
    after: Annotated[str, Meta(min_length=1, max_length=40, description="`next` of the page before")] | None = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT


class LogEntry(Struct, frozen=True):
    """One line that a function printed, or the traceback of a call. `project` null: no call's, or several projects'."""

    at: float  # seconds since the epoch
    stream: str  # stdout, stderr, traceback
    text: str
    stage: str = "call"  # start: before the function was ready
    project: str | None = None
    requests: list[str] = []  # ids of requests; for rows of a job, its id, with the row's number if known


class LogPage(Struct, frozen=True):
    """Entries, the oldest first. `next` continues after them; `is_lost`: some entries before them were dropped."""

    entries: list[LogEntry]
    next: str
    is_lost: bool = False
