"""The shared data types of batchmill: frozen structs that modules exchange, without behaviour."""

from batchmill.types.calls import (
    AdapterStats,
    BatchTimes,
    CallStats,
    ColumnBlock,
    ColumnResultBlock,
    EarlierAnswer,
    EngineStats,
    FunctionRequest,
    LiveHead,
    LiveRequest,
    Outcome,
    Request,
    ResultBlock,
    Row,
    RowBlock,
    RowError,
    Usage,
)
from batchmill.types.connectors import Action, ClientConfig, Connector, Provision, RemoteJob
from batchmill.types.isolation import Isolation
from batchmill.types.jobs import (
    Amendment,
    Commit,
    DatasetSpec,
    JobOrder,
    JobQuery,
    JobView,
    Lease,
    LedgerReport,
    Once,
    OutputSchema,
    Policy,
    Problem,
    PromptTemplate,
    ReplyRules,
    Retried,
    RetryChange,
    SalvagedTable,
    SalvageReport,
    Seal,
    SealedFile,
    SegmentPlace,
    SegmentRef,
    Shard,
    Submitted,
    Wait,
)
from batchmill.types.models import (
    AdapterSet,
    EngineEvent,
    EngineState,
    EngineView,
    FunctionSpec,
    Interface,
    Limits,
    LlmSettings,
    ModelSpec,
    Needs,
    Price,
    Scaling,
    Tensor,
)
from batchmill.types.projects import Caller, ProjectQuotas, Quotas, Scope

# fmt: off
__all__ = [
    "Action", "AdapterSet", "AdapterStats", "Amendment", "BatchTimes", "CallStats", "Caller", "ClientConfig",
    "ColumnBlock", "ColumnResultBlock", "Commit", "Connector", "DatasetSpec", "EarlierAnswer", "EngineEvent",
    "EngineState", "EngineStats", "EngineView", "FunctionRequest", "FunctionSpec", "Interface", "Isolation",
    "JobOrder", "JobQuery", "JobView", "Lease", "LedgerReport", "Limits", "LiveHead", "LiveRequest", "LlmSettings",
    "ModelSpec", "Needs", "Once", "Outcome", "OutputSchema", "Policy", "Price", "Problem", "ProjectQuotas",
    "PromptTemplate",
    "Provision", "Quotas", "RemoteJob", "ReplyRules", "Request", "Retried", "RetryChange", "ResultBlock", "Row",
    "RowBlock", "RowError", "SalvageReport", "SalvagedTable", "Scaling", "Scope", "Seal", "SealedFile", "SegmentPlace",
    "SegmentRef", "Shard", "Submitted", "Tensor", "Usage", "Wait",
]
