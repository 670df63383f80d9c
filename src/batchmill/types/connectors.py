"""Connectors: remote HTTP APIs described as data, and what providers keep of the jobs they were given."""

from __future__ import annotations

from msgspec import Struct

from batchmill.types.isolation import Isolation

PREDICT, BATCH_PREDICT = "PREDICT", "BATCH_PREDICT"
BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT = "BATCH_PREDICT_STATUS", "CANCEL_BATCH_PREDICT"


class Action(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call that a connector can make. `${parameters.x}` and `${credential.x}` stand where the words allow them."""

    action_type: str  # PREDICT, EXECUTE, BATCH_PREDICT, BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT
    method: str  # POST, GET, PUT, DELETE
    url: str
    headers: dict[str, str] = {}
    request_body: str | None = None  # None: the parameter `http_body`, or none
    pre_process_function: str | None = None  # a name of models.connectors.preprocessing
    post_process_function: str | None = None  # a name of models.connectors.postprocessing
    name: str | None = None
    supports_structured_output: bool = False  # parameters such as `_response_format_json` go into its body


class ClientConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a connector's service is called. Source: ML Commons' `client_config`; times in seconds but for `_millis`."""

    max_connection: int = 30
    connection_timeout: int = 30
    read_timeout: int = 30
    retry_backoff_policy: str = "constant"  # constant, exponential_equal_jitter, exponential_full_jitter
    retry_backoff_millis: int = 200
    retry_timeout_seconds: int = 30
    max_retry_times: int = 0  # 0: none, -1: until the timeout
    skip_ssl_verification: bool = False


class Connector(Struct, frozen=True, forbid_unknown_fields=True):
    """A remote HTTP API as data. It never holds a secret itself."""

    id: str
    name: str
    version: str
    protocol: str  # http, aws_sigv4
    actions: list[Action]  # the first of a type is the one that is meant
    description: str = ""
    parameters: dict[str, str] = {}  # everything that is no string, as its JSON
    credential: dict[str, str] = {}  # name -> "env:NAME", "file:PATH" or "secret:NAME"
    client_config: ClientConfig | None = None
    is_trusted: bool = False  # whoever runs the machine wrote it: its calls may go wherever its URLs lead

    def action(self, kind: str) -> Action | None:
        """The first action of this type or, where `kind` is no type, of this name."""
        return next((each for each in self.actions if kind in (each.action_type, each.name)), None)


class Provision(Struct, frozen=True):
    """What an owner gives a worker beside its model; it is written nowhere."""

    secrets: dict[str, str] = {}  # "secret:NAME", "env:NAME" -> the secret itself
    private_hosts: list[str] = []  # what calls of connectors that are not trusted may reach: see models.addresses
    isolation: Isolation | None = None  # of a deployed function; None: it runs as the worker does


class RemoteJob(Struct, frozen=True, omit_defaults=True):
    """A job at a provider that holds rows of one shard. Its JSON is noted with the shard's lease under its `tag`.

    intent: it was about to be handed over. submitted: the provider's id is known. unknown: nobody can say whether the
    provider took it. cancelling: it was asked to end. ended: it runs no more. collected: its rows have been read.
    forgotten: it never came to be, somebody said.
    """

    tag: str  # ours, of this submission alone; the provider's name, metadata or token for it where it has such
    provider: str  # a name of engines.provider_batch.providers
    state: str  # intent, submitted, cancelling, ended, collected, unknown, forgotten
    runs: list[tuple[int, int]] = []  # plan positions it holds: (first, count)
    rows: int = 0
    id: str = ""  # the provider's own
    input: str = ""  # what was uploaded for it: the provider's file id, or a URI
    remote_state: str = ""  # in the provider's own words
    completed: int = 0  # rows, as the provider says
    failed: int = 0
    created: float = 0.0  # seconds since the epoch
    submitted: float | None = None
    changed: float = 0.0  # when the provider last said something new
    message: str = ""  # for people: why it is unknown, what the provider said
    is_doubtful: bool = False  # it may be there twice: a reply to its making was lost, or its maker was killed
    shard: int = -1  # filled in for whoever looks
