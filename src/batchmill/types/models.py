"""Models: names that rows can be sent to."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from batchmill.types.calls import Usage
from batchmill.types.connectors import Connector
from batchmill.types.engine_traits import ROUTES, EngineTraits, traits_of

DIED = "died"  # the kind of an event: an engine's server crashed, and is restarted


class EngineState(StrEnum):
    """The state of all replicas of a model together."""

    STOPPED = "stopped"  # there is no replica: one starts on demand
    WAITING = "waiting"  # a replica waits for resources of the machine
    STARTING = "starting"
    READY = "ready"  # at least one replica serves
    FAILED = "failed"  # it could not be started, or crashed too often
    STOPPING = "stopping"


class EngineEvent(Struct, frozen=True):
    """An event of the replicas of a model."""

    at: float  # seconds since the epoch
    kind: str  # waiting, starting, ready, died, failed, restarted, scaled, stopping, stopped
    message: str = ""  # for users; after a failure, the engine's last lines of output
    replica: int | None = None
    in_flight: int | None = None  # of a crash: how many requests of the viewing project were in flight
    by_project: dict[str, int] = {}  # the same for every project; not shown to callers


class EngineView(Struct, frozen=True):
    """The current replicas of a model and recent events, the oldest first."""

    state: str = EngineState.STOPPED
    replicas: int = 0  # that run or start
    ready: int = 0
    wanted: int = 0
    message: str = ""  # why it waits or has failed
    events: list[EngineEvent] = []


def visible_event(event: EngineEvent, project: str, message: str) -> EngineEvent:
    """Return an event as a project may see it, with only its own number of requests in flight."""
    own_in_flight = event.by_project.get(project, 0) if event.kind == DIED else None
    return replace(event, message=message, in_flight=own_in_flight, by_project={})


ALONE_DEATHS_MAX = 2  # crashes of an engine with this request alone in flight, after which it is refused
BUDGET_WINDOW_S = 3600.0


class Suspect(Struct, frozen=True):
    """A request that was alone in flight when an engine crashed."""

    digest: str  # of the base model, the path, the adapter and the body
    project: str
    url: str
    deaths: int  # from ALONE_DEATHS_MAX on it is refused
    at: float  # of the last crash, in seconds since the epoch
    model: str = ""

    @property
    def is_refused(self) -> bool:
        return self.deaths >= ALONE_DEATHS_MAX


class Charge(Struct, frozen=True):
    """A crash of an engine that counts against a project."""

    project: str
    at: float  # seconds since the epoch


class Poison(Struct, frozen=True):
    """The quarantine state that an engine gets when it starts, and after each change."""

    suspects: list[Suspect] = []
    charges: list[Charge] = []  # of the last hour
    deaths_per_hour: int = 3  # per project: beyond it, its requests run last and alone


class Price(Struct, frozen=True, forbid_unknown_fields=True):
    """USD per million tokens. `cached` is the price of cached input tokens; None: as `input`."""

    input: float = 0.0
    cached: float | None = None
    output: float = 0.0

    @classmethod
    def of(cls, price: Price | float | None) -> Price | None:
        """Return a price from the configuration. A number is the price of every token: input, cached and output."""
        return cls(input=price, output=price) if isinstance(price, int | float) else price

    @property
    def is_one(self) -> bool:
        """Tell whether every token costs the same."""
        return self.input == self.output and self.cached in (None, self.input)

    @property
    def in_words(self) -> str:
        """Format the price: "0.5", or "1 in, 0.25 cached, 2 out"."""
        if self.is_one:
            return f"{self.input:g}"
        cached = "" if self.cached is None else f", {self.cached:g} cached"
        return f"{self.input:g} in{cached}, {self.output:g} out"

    def cost(self, usage: Usage) -> float:
        """Return the cost of `usage` in USD."""
        cached = self.input if self.cached is None else self.cached
        uncached = usage.input_tokens - usage.cached_tokens
        return (uncached * self.input + usage.cached_tokens * cached + usage.output_tokens * self.output) / 1e6


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the calls of a service or worker. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    in_flight_max: int | None = None  # rows sent without a reply yet, per worker
    attempts_max: int = 5  # calls for one row, with the first; throttled ones do not count
    connect_timeout_s: float = 5.0
    attempt_timeout_s: float = 600.0  # of one call, from the first byte sent to the last received
    memory_bytes: int | None = None  # address space of one worker
    adapters_max: int | None = None  # adapters that an engine of an LLM holds at once
    # Limits of structured output (a JSON schema, a pattern, a grammar, tools) of a local LLM, for one request:
    schema_bytes_max: int = 256 * 1024  # in total
    schema_nodes_max: int = 10_000  # objects, lists and values in it
    schema_repetitions_max: int = 100_000  # of a count such as `maxItems`


class Needs(Struct, frozen=True, forbid_unknown_fields=True):
    """The resources of one replica of a model. 0: not counted."""

    memory_bytes: int = 0
    gpus: int = 0
    cpus: float | None = None  # on a cluster; None: 1 is reserved, and the engine decides on its threads
    resources: dict[str, float] = {}  # custom resources of a cluster's nodes


class Scaling(Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas a model has, and how long idle ones stay."""

    replicas_min: int = 0  # that stay even if idle; 0: all replicas of an idle model stop
    replicas_max: int = 1
    cooldown_s: float | None = None  # an idle replica stops after so long; None: server.idle_unload_s
    scale_up_requests: int | None = None  # requests per replica above which another one starts; None: 128


class AdapterSet(Struct, frozen=True):
    """The adapters that rows of one model may use. An adapter's own name is "NAME/VERSION", or its configured name."""

    places: dict[str, str] = {}  # own name -> directory or id
    names: dict[str, str] = {}  # other names for rows -> own name: "NAME" means its newest version
    bad: dict[str, str] = {}  # own name -> why it cannot be used: the error of its rows


class Tensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output of a typed function."""

    name: str
    datatype: str | None = None  # of the Open Inference Protocol, or STRING: BYTES that are UTF-8; None: any JSON value
    shape: list[int] = field(default_factory=lambda: [1])  # [1]: one value, not a list; -1: any length
    required: bool = True
    example: Any = None  # JSON; None: no example
    is_array: bool = False  # the function takes (returns) a numpy array


class Interface(Struct, frozen=True, forbid_unknown_fields=True):
    """The inputs and outputs of a function, from its code or its schema."""

    inputs: list[Tensor] = []  # in the order of the function's parameters
    outputs: list[Tensor] | None = None  # None: any value
    calls: str = "row"  # row: one call per row; list: many rows, a list per parameter; frame: many rows, a data frame
    takes: str = "arguments"  # arguments: by name or position; dict: one dict (Inferless); rows: a list of dicts
    has_schema: bool = False  # inputs are checked against it; otherwise types come from type hints and are not checked
    takes_more: bool = False  # accepts arguments with any other name
    is_async: bool = False
    streams: bool = False  # a generator, or it sends events itself
    batch_size: int = 0  # rows per call, as started; 0: unknown
    batch_window_s: float = 0.0  # the longest that an idle worker waits for them, as started
    summary: str = ""  # the first line of its docstring


class DeployedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """What a version is whose code is a class that validates answers. It is called as no model."""

    document: str  # the JSON Schema of the class, as JSON
    has_validators: bool  # it has code that validates; otherwise the document says all


class FunctionSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A deployed version of a function: its code, and how its process calls it.

    Code that is run where it lies has no version, folder and digest.
    """

    version: str  # "main/3"
    folder: str  # absolute path of its code, which does not change; `source` is relative to it
    digest: str  # sha256 of the code and of the environment
    interface: Interface = Interface()
    batch_size: int = 0  # rows of live requests and jobs per call; 0: the function's own setting
    batch_window_s: float | None = None  # the longest wait for a batch to fill; None: the function's own setting
    frame_columns: list[str] = []  # of a data-frame function
    is_idempotent: bool = False  # a call whose worker crashed may be repeated
    environment: dict[str, str] = {}  # variables
    secrets: dict[str, str] = {}  # variable -> "env:NAME", "file:PATH" or "secret:NAME"
    gpus: int = 0  # per worker
    packages: list[str] = []  # of its environment, from the lock: "numpy==2.1.0"
    received_shapes: bool = False  # a tensor with one element is a single value, even if the schema differs (Inferless)
    schema: DeployedSchema | None = None  # None: it is a function

    @property
    def number(self) -> str:
        """Return the version in its branch: "3"."""
        return self.version.rpartition("/")[2]


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A model that rows can be sent to, as it was when the job was submitted."""

    name: str
    engine: str  # a name of types/engine_traits.py; "routes": one of `routes`, chosen for each job
    source: str  # what the engine loads: FILE.py:NAME, a model directory or id, a remote model name
    adapters: dict[str, str] = {}  # own name -> path or id
    adapter_names: dict[str, str] = {}  # as AdapterSet.names
    bad_adapters: dict[str, str] = {}  # as AdapterSet.bad
    adapter_patterns: list[str] = []  # ids of a model hub that rows may name: a job registers them
    adapter_rank: int = 0  # the largest adapter rank that its engine supports; 0: no adapters
    paths: list[str] = []  # further paths for rows and calls: "/v1/images/generations"
    features: list[str] = []  # further features that callers may use; names of wire.features
    base_url: str | None = None
    api_key: str | None = None  # "env:NAME", "file:PATH" or "secret:NAME"; a spec never contains a secret
    engine_args: dict[str, str | int | float | bool | None] = {}  # flags of the engine's command line
    python: str | None = None  # interpreter of the engine's environment; None: detected
    workers: int = 1  # processes (function), replicas (llm)
    needs: Needs = Needs()
    scaling: Scaling | None = None  # None: `workers` replicas, which stay idle as long as the server's default
    secrets: dict[str, str] = {}  # variable of the engine's environment -> "env:NAME", "file:PATH" or "secret:NAME"
    price: Price | None = None
    limits: Limits = Limits()
    allowed: list[str] | None = None  # the names, of the model and its adapters, that rows may use; None: all
    function: FunctionSpec | None = None  # of a deployed version
    connector: Connector | None = None  # describes the calls, also of a provider's batch API
    alias: str | None = None  # another name of this model
    provider: str | None = None  # of a batch API: a name of models.providers.PROVIDERS
    routes: list[ModelSpec] = []  # to the same model: all routes, or the others once one is chosen
    is_deterministic: bool = False  # equal requests have equal results: they may be those of an earlier job

    @property
    def traits(self) -> EngineTraits:
        """Return the traits of its engine. Raises: UnknownName."""
        return traits_of(self.engine)

    @property
    def needs_route(self) -> bool:
        """Tell whether it has routes and none is chosen yet."""
        return self.engine == ROUTES

    @property
    def takes_columns(self) -> bool:
        """Tell whether rows are arguments or parameters (functions, connectors). Otherwise they are requests."""
        return all(route.takes_columns for route in self.routes) if self.needs_route else self.traits.takes_columns

    @property
    def is_handed_over(self) -> bool:
        """Tell whether its rows go to a provider's batch API, where they run without a worker."""
        return self.traits.hands_over

    def live(self) -> ModelSpec:
        """Return the model for live requests: itself, or its first route that supports them."""
        live_routes = [replace(each, name=self.name, allowed=self.allowed) for each in self.routes if each.answers_live]
        return live_routes[0] if self.needs_route and live_routes else self

    @property
    def answers_live(self) -> bool:
        """Tell whether it supports live requests: a batch API does not."""
        return any(route.answers_live for route in self.routes) if self.needs_route else self.traits.answers_live

    def targets(self) -> dict[str, str | None]:
        """Map every value of `body.model` for this model to its adapter (None: the base)."""
        adapter_names = self.adapter_names
        if self.allowed is not None:  # names of deployments and registered models: NAME, NAME@3, NAME@prod, an id
            adapters = {name: adapter_names.get(name, name) for name in self.allowed}
            return {name: adapter if adapter in self.adapters else None for name, adapter in adapters.items()}
        names: dict[str, str | None] = {self.name: None, self.source: None}
        if self.alias is not None:
            names[self.alias] = None
        return names | {adapter: adapter for adapter in self.adapters} | adapter_names

    def adapter_set(self) -> AdapterSet:
        return AdapterSet(self.adapters, self.adapter_names, self.bad_adapters)


class LlmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A base model and the settings of its engine."""

    base_model: str  # a model of the configuration, or an id of a model hub that it allows
    engine_args: dict[str, str | int | float | bool] = {}  # flags of the engine that callers may set
    hf_token: str | None = None  # "secret:NAME": the token for a model hub
    scaling: Scaling = Scaling()
    needs: Needs = Needs()  # 0: as the base model
    takes_adapters: bool = True
    preloaded_adapters: list[str] = []  # adapters that the engine loads at its start
