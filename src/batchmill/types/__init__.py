"""The nouns of batchmill: frozen structs that cross module borders, and nothing that acts."""

from batchmill.types.callers import Caller, Scope
from batchmill.types.calls import AdapterStats, Ask, BatchTimes, CallStats, EngineStats, LiveHead, LiveRequest
from batchmill.types.connectors import Action, ClientConfig, Connector, Provision, RemoteJob
from batchmill.types.datasets import DatasetSpec, Problem, Seal, SealedFile
from batchmill.types.engines import EngineEvent, EngineState, EngineView
from batchmill.types.isolation import Isolation
from batchmill.types.jobs import Amendment, JobOrder, JobQuery, JobView, Once, Policy, Submitted, Wait
from batchmill.types.ledger import Commit, Lease, LedgerReport, SalvagedTable, SalvageReport, SegmentRef, Shard
from batchmill.types.llms import LlmSettings
from batchmill.types.models import (
    AdapterSet,
    FunctionSpec,
    Interface,
    Limits,
    ModelSpec,
    Needs,
    Price,
    Scaling,
    Tensor,
)
from batchmill.types.quotas import ProjectQuotas, Quotas
from batchmill.types.rows import Outcome, Request, Row, RowError, Usage

# fmt: off
__all__ = [
    "Action", "AdapterSet", "AdapterStats", "Amendment", "Ask", "BatchTimes", "CallStats", "Caller", "ClientConfig",
    "Commit", "Connector", "DatasetSpec", "EngineEvent", "EngineState", "EngineStats", "EngineView", "FunctionSpec",
    "Interface", "Isolation", "JobOrder", "JobQuery", "JobView", "Lease", "LedgerReport", "Limits", "LiveHead",
    "LiveRequest", "LlmSettings", "ModelSpec", "Needs", "Once", "Outcome", "Policy", "Price", "Problem",
    "ProjectQuotas", "Provision", "Quotas", "RemoteJob", "Request", "Row", "RowError",
    "SalvageReport", "SalvagedTable", "Scaling", "Scope",
    "Seal", "SealedFile", "SegmentRef", "Shard", "Submitted", "Tensor", "Usage", "Wait",
]
