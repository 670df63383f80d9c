"""Named points between two durable steps at which a test may kill a process: BATCHMILL_FAULT=NAME:COUNT:FILE.

The first process that passes the point NAME for the COUNT-th time ends as by SIGKILL; FILE, which it makes, says that
it has happened. Unset, a point costs one comparison.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "after_describe",  # job.json is written, the ledger knows nothing of the job
    "after_create",  # the job is in the ledger, nothing of its dataset is sealed
    "after_prepare",  # sealed and planned, the ledger says validating
    "after_lease",  # an epoch was raised, nobody was told
    "before_append",  # outcomes are in memory
    "after_append",  # and in the kernel
    "after_sync",  # and on disk, no commit was sent
    "after_send",  # the commit is on its way to the owner
    "in_commit",  # inside the ledger's transaction
    "after_commit",  # counted, not acknowledged
    "before_publish",  # every row has its outcome, no result file is there
    "after_publish",  # the result files are there, the ledger says finalizing
)
FILE_POINTS = (  # the same for a server's files
    "after_settle",  # a file's bytes are durable under its id, it has no record
    "after_forget",  # its record is gone, its bytes are still there
)
SECRET_POINTS = (  # and for the rotation of what secrets are encrypted with
    "after_key_file",  # the new key file is written, beside the old one
    "after_new_key",  # it is in its place, everything is still under the old key
    "in_rewrap",  # a page of secrets is under the new key
    "after_rewrap",  # all are, the old key is still there
)
PROVIDER_POINTS = (  # of a job that a provider is given rows of
    "before_note",  # what was put is on its way to the owner, the note of it is not
    "after_note",  # what an engine noted with its lease is durable, it was not told
    "before_submit",  # the intent is noted, the provider knows nothing of the job
    "after_submit",  # the provider has the job, nobody here knows its id
    "after_submit_noted",  # its id is noted, nobody has asked after it
)
TASK_POINTS = (  # and of a task of ML Commons
    "after_task",  # the task is stored, nobody was given its batch
    "after_hand_over",  # the provider has the batch, its task does not know it
    "after_task_job",  # the job of its dataset is stored, its task does not know it
)
ADAPTER_POINTS = (  # and of an adapter that is registered
    "after_adapter_record",  # its version is written down, nothing of it is here
    "after_adapter",  # its folder is whole, its version says fetching
)
DATASET_POINTS = (  # and of a dataset that gets a name
    "after_begin",  # it is awaited, nobody was given the link
    "after_arrival",  # its bytes and their record are durable, whoever sent them was not told
    "after_name",  # it has its name, nobody has begun to look at its rows
    "after_check",  # its rows were looked at, what was found is not written down
)
SALVAGE_POINTS = (  # and of a database that another takes the place of
    "before_salvaged",  # the new one is whole, in the folder where it was made
    "after_salvaged",  # it waits beside the old one
    "after_set_aside",  # the old one has a second name
    "after_strays",  # what has no record any more lies apart
    "after_logs",  # the old one's log is gone
)
RETENTION_POINTS = (  # and of a job that is removed, or of which only the results stay
    "after_remove",  # its record is gone, its files are there
    "after_ending",  # its record lies beside its results, the ledger knows its segments still
    "after_parts_dropped",  # the ledger knows them no more, they are there
    "after_plan_dropped",  # the first of them to go, by whose lack a salvage knows
    "after_clear",  # they are gone, and still written down as pending
)
BACKUP_POINTS = (
    "before_backup",  # the copy is whole, under another name
    "after_backup",  # it has its name, the oldest is still there
)

_name, _, _rest = os.environ.get("BATCHMILL_FAULT", "").partition(":")
_count, _, _file = _rest.partition(":")
_left = int(_count or 1)


def point(name: str) -> None:
    """Die here if a test asks for it."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        try:
            os.close(os.open(_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
