"""Connectors: remote HTTP APIs described as data, and jobs at providers' batch APIs."""

from __future__ import annotations

from msgspec import Struct

from batchmill.types.isolation import Isolation

PREDICT, BATCH_PREDICT = "PREDICT", "BATCH_PREDICT"
BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT = "BATCH_PREDICT_STATUS", "CANCEL_BATCH_PREDICT"


class Action(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of a connector. Its fields may contain `${parameters.x}` and `${credential.x}`."""

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
    """How a connector's service is called. Source: ML Commons' `client_config`; times in seconds, except `_millis`."""

    max_connection: int = 30
    connection_timeout: int = 30
    read_timeout: int = 30
    retry_backoff_policy: str = "constant"  # constant, exponential_equal_jitter, exponential_full_jitter
    retry_backoff_millis: int = 200
    retry_timeout_seconds: int = 30
    max_retry_times: int = 0  # 0: none, -1: until the timeout
    skip_ssl_verification: bool = False


class Connector(Struct, frozen=True, forbid_unknown_fields=True):
    """A remote HTTP API as data. It does not contain secrets."""

    id: str
    name: str
    version: str
    protocol: str  # http, aws_sigv4
    actions: list[Action]  # the first action of a type is used
    description: str = ""
    parameters: dict[str, str] = {}  # values that are not strings are JSON
    credential: dict[str, str] = {}  # name -> "env:NAME", "file:PATH" or "secret:NAME"
    client_config: ClientConfig | None = None
    is_trusted: bool = False  # written by the operator: its URLs may lead anywhere

    @property
    def is_stored(self) -> bool:
        """Whether it is in the database; the id of one that is a file has the file's suffix."""
        return "." not in self.id

    def action(self, kind: str) -> Action | None:
        """Return the first action with this type or name."""
        return next((each for each in self.actions if kind in (each.action_type, each.name)), None)


class Storage(Struct, frozen=True):
    """The object store that outcomes are written to."""

    url: str
    environ: dict[str, str] = {}  # settings that the store's client reads, for processes that lack them
    credentials: dict[str, str] = {}  # as `environ`, for processes that have no credentials of their own

    def __repr__(self) -> str:  # without credentials
        return f"Storage({self.url})"


class Provision(Struct, frozen=True):
    """What the owner gives a worker besides its model. It is not stored."""

    secrets: dict[str, str] = {}  # "secret:NAME", "env:NAME" -> the secret itself
    private_hosts: list[str] = []  # that calls of untrusted connectors may reach: see models.addresses
    isolation: Isolation | None = None  # of deployed code; None: none
    storage: Storage | None = None  # None: outcomes lie in the data directory

    @property
    def has_secrets(self) -> bool:
        """Whether a reader of it learns a secret or a credential."""
        return bool(self.secrets or (self.storage is not None and self.storage.credentials))


class RemoteJob(Struct, frozen=True, omit_defaults=True):
    """A job at a provider with rows of one shard. Its JSON is stored with the shard's lease under its `tag`.

    intent: about to be submitted. submitted: the provider's id is known. unknown: it is not known whether the provider
    accepted it. cancelling: it was cancelled. ended: it has ended. collected: its rows have been read. forgotten: a
    user declared that it does not exist.
    """

    tag: str  # our id of this submission; sent as the provider's name, metadata or token if it has one
    provider: str  # a name of engines.provider_batch.providers
    state: str  # intent, submitted, cancelling, ended, collected, unknown, forgotten
    runs: list[tuple[int, int]] = []  # its plan positions: (first, count)
    rows: int = 0
    id: str = ""  # the provider's id
    input: str = ""  # what was uploaded for it: the provider's file id, or a URI
    remote_state: str = ""  # the provider's status
    completed: int = 0  # rows, as the provider reports
    failed: int = 0
    created: float = 0.0  # seconds since the epoch
    submitted: float | None = None
    changed: float = 0.0  # when the provider last reported a change
    message: str = ""  # for users: why it is unknown, what the provider reported
    is_doubtful: bool = False  # it may exist twice: the reply to its creation was lost, or the process was killed
    attempt: int = 0  # 0: its rows are asked for the first time; n: for the n-th time again
    # Plan positions of rows whose answers here do not fit their schema. What these have cost is counted, and the rows
    # are asked for again, with answers that the results of this job have.
    misfits: list[tuple[int, int]] = []
    shard: int = -1  # filled in for views
