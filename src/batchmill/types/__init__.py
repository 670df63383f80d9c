"""The nouns of batchmill: frozen structs that cross module borders, and nothing that acts."""

from batchmill.types.callers import Caller, Scope
from batchmill.types.calls import Ask, BatchTimes, CallStats, EngineStats, LiveHead, LiveRequest
from batchmill.types.connectors import Action, ClientConfig, Connector, Provision, RemoteJob
from batchmill.types.datasets import DatasetSpec, Problem, Seal, SealedFile
from batchmill.types.jobs import Amendment, JobOrder, JobQuery, JobView, Once, Policy, Submitted, Wait
from batchmill.types.ledger import Commit, Lease, LedgerReport, SegmentRef, Shard
from batchmill.types.models import FunctionSpec, Interface, Limits, ModelSpec, Price, Tensor
from batchmill.types.rows import Outcome, Request, Row, RowError, Usage

# fmt: off
__all__ = [
    "Action", "Amendment", "Ask", "BatchTimes", "CallStats", "Caller", "ClientConfig", "Commit", "Connector",
    "DatasetSpec", "EngineStats", "FunctionSpec", "Interface", "JobOrder", "JobQuery", "JobView", "Lease",
    "LedgerReport", "Limits", "LiveHead", "LiveRequest", "ModelSpec", "Once", "Outcome", "Policy", "Price", "Problem",
    "Provision", "RemoteJob", "Request", "Row", "RowError", "Scope", "Seal", "SealedFile", "SegmentRef", "Shard",
    "Submitted", "Tensor", "Usage", "Wait",
]
