"""Between an engine of language models and the recorder: a reply is checked before it counts as a row's result."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from batchmill.executors.recorder import Recorder
from batchmill.types import Outcome
from batchmill.wire.replies import error_of, warnings_of


class ReplyChecks:
    """The sink of an engine whose results are the replies of a model or a service."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.put_block = recorder.put_block

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """See `ports.Sink`."""
        self._recorder.put(map(_checked, outcomes))


def _checked(outcome: Outcome) -> Outcome:
    if outcome.error is not None or outcome.body is None or not (warnings := warnings_of(outcome.body)):
        return outcome
    rules = outcome.row.lease.job.replies
    refused = next((name for name in warnings if name in rules.fail_on), None)
    if refused is not None:
        return replace(outcome, error=error_of(refused))
    return replace(outcome, warnings=warnings)
