"""What the frontends' events are called."""

from __future__ import annotations

import pytest

from batchmill.services.webhooks.endpoints import EVENT_TYPES, EndedJob, event_of


def test_types_stand_once():
    """Doors whose jobs are called the same have the same events: each type is offered once."""
    assert len(set(EVENT_TYPES)) == len(EVENT_TYPES) == 8


@pytest.mark.parametrize(
    ("frontend", "kind", "shown"),
    [("openai", "batch.completed", "batch_1"), ("native", "job.completed", "job_1"),
     ("ml_commons", "job.completed", "job_1")],
)  # fmt: skip
def test_events_have_the_words_of_their_door(frontend, kind, shown):
    """A job's end is told in the words and with the id that its frontend has for it."""
    event = event_of(EndedJob("job_1", 0, "completed", 1.0, 2.0, "default", frontend))
    assert (event.type, event.data.id) == (kind, shown)
