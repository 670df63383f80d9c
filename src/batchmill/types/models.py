"""Models: names that rows can be sent to."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from batchmill.types.calls import Usage
from batchmill.types.connectors import Connector
from batchmill.types.engine_traits import ROUTES, EngineTraits, traits_of

DIED = "died"  # the kind of an event: a server ended under its worker, and is started again


class EngineState(StrEnum):
    """Of all replicas of a model together."""

    STOPPED = "stopped"  # there is none: it starts when somebody asks
    WAITING = "waiting"  # one is wanted, and the machine has no room for it
    STARTING = "starting"
    READY = "ready"  # one at least answers
    FAILED = "failed"  # it could not be started, or died too often
    STOPPING = "stopping"


class EngineEvent(Struct, frozen=True):
    """Something that became of the replicas of a model."""

    at: float  # seconds since the epoch
    kind: str  # waiting, starting, ready, died, failed, restarted, scaled, stopping, stopped
    message: str = ""  # for people; of a failure the engine's last lines
    replica: int | None = None
    in_flight: int | None = None  # of a death: how many requests of the project that asks were in flight
    by_project: dict[str, int] = {}  # the same of every project; told to nobody


class EngineView(Struct, frozen=True):
    """The replicas of a model now, and what became of them lately, the oldest event first."""

    state: str = EngineState.STOPPED
    replicas: int = 0  # that run or start
    ready: int = 0
    wanted: int = 0
    message: str = ""  # why it waits or has failed
    events: list[EngineEvent] = []


def seen(event: EngineEvent, project: str, message: str) -> EngineEvent:
    """An event as a project may know of it: how many requests of its own were in flight, of others nothing."""
    own = event.by_project.get(project, 0) if event.kind == DIED else None
    return replace(event, message=message, in_flight=own, by_project={})


ALONE_DEATHS_MAX = 2  # of an engine with one request alone in flight: then it is refused
BUDGET_WINDOW_S = 3600.0


class Suspect(Struct, frozen=True):
    """A request that was alone in flight when an engine died."""

    digest: str  # of the base model, the path, the adapter and the body
    project: str  # whose it was
    url: str
    deaths: int  # from ALONE_DEATHS_MAX on it is refused
    at: float  # seconds since the epoch: the last of them
    model: str = ""

    @property
    def is_refused(self) -> bool:
        return self.deaths >= ALONE_DEATHS_MAX


class Charge(Struct, frozen=True):
    """A death of an engine that is a project's."""

    project: str
    at: float  # seconds since the epoch


class Poison(Struct, frozen=True):
    """What an engine of a model knows of such requests when it starts, and whenever that changes."""

    suspects: list[Suspect] = []
    charges: list[Charge] = []  # of the last hour
    deaths_per_hour: int = 3  # of one project: beyond it, its requests run last and alone


class Price(Struct, frozen=True, forbid_unknown_fields=True):
    """USD per million tokens. `cached` is the price of an input token that was cached; None: as `input`."""

    input: float = 0.0
    cached: float | None = None
    output: float = 0.0

    @classmethod
    def of(cls, price: Price | float | None) -> Price | None:
        """A price as people write it: one number is that of every token, input, cached or output."""
        return cls(input=price, output=price) if isinstance(price, int | float) else price

    @property
    def is_one(self) -> bool:
        """Every token costs the same."""
        return self.input == self.output and self.cached in (None, self.input)

    @property
    def in_words(self) -> str:
        """ "0.5", or "1 in, 0.25 cached, 2 out"."""
        if self.is_one:
            return f"{self.input:g}"
        cached = "" if self.cached is None else f", {self.cached:g} cached"
        return f"{self.input:g} in{cached}, {self.output:g} out"

    def cost(self, usage: Usage) -> float:
        """USD for `usage`."""
        cached = self.input if self.cached is None else self.cached
        fresh = usage.input_tokens - usage.cached_tokens
        return (fresh * self.input + usage.cached_tokens * cached + usage.output_tokens * self.output) / 1e6


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """What a service or a worker may be asked for. None: no limit of ours."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight_max: int | None = None  # rows sent and not yet answered, per worker
    attempts_max: int = 5  # calls for one row, the first included; throttled ones do not count
    connect_timeout_s: float = 5.0
    attempt_timeout_s: float = 600.0  # one call, from the first byte sent to the last received
    memory_bytes: int | None = None  # address space of one worker
    adapters_max: int | None = None  # adapters that an engine of an LLM holds at once
    # What shapes an answer of an LLM served here (a JSON schema, a pattern, a grammar, tools), for one request:
    schema_bytes_max: int = 256 * 1024  # all of it together
    schema_nodes_max: int = 10_000  # objects, lists and values in it
    schema_repetitions_max: int = 100_000  # what a count such as `maxItems` may say


class Needs(Struct, frozen=True, forbid_unknown_fields=True):
    """What one replica of a model takes of the machine. 0: nothing that counts."""

    memory_bytes: int = 0
    gpus: int = 0


class Scaling(Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas a model has at a time, and how long they stay when nobody uses them."""

    replicas_min: int = 0  # that stay whether anybody uses them or not; 0: none, once it has been idle
    replicas_max: int = 1
    cooldown_s: float | None = None  # an idle replica goes after so long; None: server.idle_unload_s
    scale_up_requests: int | None = None  # another replica starts above so many requests a replica; None: 128


class AdapterSet(Struct, frozen=True):
    """The adapters that rows of one model may use. An adapter's own name is "NAME/VERSION", or as it is configured."""

    places: dict[str, str] = {}  # own name -> directory or id
    names: dict[str, str] = {}  # what rows may call it besides -> own name: "NAME" means its newest version
    bad: dict[str, str] = {}  # own name -> why it cannot be used: its rows fail with that


class Tensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output of a typed function."""

    name: str
    datatype: str | None = None  # of the Open Inference Protocol, or STRING: BYTES that are UTF-8; None: any JSON value
    shape: list[int] = field(default_factory=lambda: [1])  # [1]: one value, not a list; -1: any length
    required: bool = True
    example: Any = None  # JSON; None: there is none
    is_array: bool = False  # the function takes (returns) a numpy array


class Interface(Struct, frozen=True, forbid_unknown_fields=True):
    """What a function takes and returns, as its code or its schema says it."""

    inputs: list[Tensor] = []  # in the order of the function's own parameters
    outputs: list[Tensor] | None = None  # None: whatever it returns
    calls: str = "row"  # row: called for each; list: for many, a list for each parameter; frame: for many, a data frame
    takes: str = "arguments"  # arguments: by name or position; dict: one dict (Inferless); rows: a list of dicts
    has_schema: bool = False  # inputs are checked against it; otherwise types are what the hints say, and a hint
    takes_more: bool = False  # further arguments by any name
    is_async: bool = False
    streams: bool = False  # it is a generator, or sends its events itself
    batch_size: int = 0  # rows that go together in one call, as it was started; 0: not known
    batch_window_s: float = 0.0  # how long an idle worker waits for them
    summary: str = ""  # the first line of its docstring


class FunctionSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A version of a function as it was deployed: its code, and how it is called in a process of its own."""

    version: str  # "main/3"
    folder: str  # absolute: holds its code, and nothing writes there any more; `source` is relative to it
    digest: str  # sha256 of the code and of the environment
    interface: Interface = Interface()
    batch_size: int = 0  # rows of live requests and jobs that go together in one call; 0: as the function is marked
    batch_window_s: float = 0.0  # how long an idle worker waits for a batch to fill
    frame_columns: list[str] = []  # of a data-frame function
    is_idempotent: bool = False  # a call whose worker died may be made again
    environment: dict[str, str] = {}  # variables
    secrets: dict[str, str] = {}  # variable -> "env:NAME", "file:PATH" or "secret:NAME"
    gpus: int = 0  # of each worker
    packages: list[str] = []  # of its environment, from the lock: "numpy==2.1.0"
    received_shapes: bool = False  # a tensor of one element is a single value, whatever the schema says (Inferless)

    @property
    def number(self) -> str:
        """Which version of its branch it is: "3"."""
        return self.version.rpartition("/")[2]


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A name that rows can be sent to, as the job saw it when it was submitted."""

    name: str
    engine: str  # a name of types/engine_traits.py; "routes": whichever of `routes` a job is given
    source: str  # what the engine loads: FILE.py:NAME, a model directory or id, a remote model name
    adapters: dict[str, str] = {}  # own name -> path or id
    adapter_names: dict[str, str] = {}  # as AdapterSet.names
    bad_adapters: dict[str, str] = {}  # as AdapterSet.bad
    adapter_patterns: list[str] = []  # ids of a model hub that rows may name: they are registered when a job comes
    adapter_rank: int = 0  # the largest rank of adapters that its engine has room for; 0: it takes none
    paths: list[str] = []  # that rows and calls may have besides those of every such model: "/v1/images/generations"
    features: list[str] = []  # what callers of a server may have it do besides answer; as wire.features names it
    base_url: str | None = None
    api_key: str | None = None  # "env:NAME", "file:PATH" or "secret:NAME"; a secret itself never lies in a spec
    engine_args: dict[str, str | int | float | bool | None] = {}  # flags of the engine, as its command line has them
    python: str | None = None  # interpreter of the environment the engine lives in; None: found
    workers: int = 1  # processes (function), replicas (llm)
    needs: Needs = Needs()
    scaling: Scaling | None = None  # None: as many replicas as `workers` says, kept as the server says
    secrets: dict[str, str] = {}  # variable of the engine's environment -> "env:NAME", "file:PATH" or "secret:NAME"
    price: Price | None = None
    limits: Limits = Limits()
    allowed: list[str] | None = None  # of the model's own name and its adapters', those that rows may use; None: all
    function: FunctionSpec | None = None  # of a deployed version
    connector: Connector | None = None  # that describes the calls, and how a provider's batch API is called
    alias: str | None = None  # a further name that means this model and not one of its service's
    provider: str | None = None  # of a batch API: openai, azure, anthropic, cohere, sagemaker, bedrock
    routes: list[ModelSpec] = []  # to the same model: all of them, or those left besides the chosen one

    @property
    def traits(self) -> EngineTraits:
        """What its engine is like. Raises: UnknownName."""
        return traits_of(self.engine)

    @property
    def needs_route(self) -> bool:
        """It has routes, and none of them is chosen."""
        return self.engine == ROUTES

    @property
    def takes_columns(self) -> bool:
        """Rows are arguments or parameters of its own: functions and connectors. Otherwise they are requests."""
        return all(route.takes_columns for route in self.routes) if self.needs_route else self.traits.takes_columns

    @property
    def is_handed_over(self) -> bool:
        """Its rows go to a provider's batch API: they run on there while no worker of ours does."""
        return self.traits.hands_over

    def live(self) -> ModelSpec:
        """The way that live requests take: itself, or the first of its routes that answers them."""
        ways = [replace(each, name=self.name, allowed=self.allowed) for each in self.routes if each.answers_live]
        return ways[0] if self.needs_route and ways else self

    @property
    def answers_live(self) -> bool:
        """Somebody may wait for its answer: it is no batch API."""
        return any(route.answers_live for route in self.routes) if self.needs_route else self.traits.answers_live

    def targets(self) -> dict[str, str | None]:
        """Every value `body.model` may have for this model -> the adapter it means (None: the base)."""
        own = self.adapter_names
        if self.allowed is not None:  # of what was deployed or registered: NAME, NAME@3, NAME@prod, an id
            named = {name: own.get(name, name) for name in self.allowed}
            return {name: adapter if adapter in self.adapters else None for name, adapter in named.items()}
        names: dict[str, str | None] = {self.name: None, self.source: None}
        if self.alias is not None:
            names[self.alias] = None
        return names | {adapter: adapter for adapter in self.adapters} | own

    def adapter_set(self) -> AdapterSet:
        return AdapterSet(self.adapters, self.adapter_names, self.bad_adapters)


class LlmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A base model and how its engine is to run."""

    base_model: str  # a model of the configuration, or an id of a model hub that it allows
    engine_args: dict[str, str | int | float | bool] = {}  # flags of the engine that callers may set
    hf_token: str | None = None  # "secret:NAME": what the engine shows a model hub
    scaling: Scaling = Scaling()
    needs: Needs = Needs()  # 0: as the base model
    takes_adapters: bool = True
    preloaded_adapters: list[str] = []  # names of adapters that are in the engine before anybody asks for them
