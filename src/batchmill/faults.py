"""Fault points between two durable steps, at which a test may kill a process: BATCHMILL_FAULT=NAME:COUNT:FILE.

The first process that passes the point NAME for the COUNT-th time creates FILE and ends by SIGKILL, or gets another
signal, BATCHMILL_FAULT_SIGNAL=SIGSTOP. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "after_describe",  # job.json is written, the ledger does not have the job yet
    "after_create",  # the job is in the ledger, its dataset is not sealed, except that of a short job
    "after_prepare",  # sealed and planned, the ledger says validating, and has no short job yet
    "after_lease",  # an epoch was raised, the worker does not know it yet
    "before_append",  # outcomes are in memory
    "after_append",  # they are in the kernel
    "after_sync",  # they are on disk, no commit was sent
    "after_send",  # the commit is on its way to the owner
    "in_commit",  # inside the ledger's transaction
    "after_commit",  # counted, not acknowledged
    "before_publish",  # every row has its outcome, there is no result file
    "after_publish",  # the result files exist, the ledger says finalizing
)
PART_POINTS = (  # results in a folder of parts
    "after_part",  # a part is in its place, the manifest does not name it
    "before_manifest",  # all parts are in their places, there is no manifest
    "after_manifest",  # the manifest is there, parts that do not count remain
)
REUSE_POINTS = (  # results of an earlier job are taken over
    "in_reuse_index",  # the columns of its index are written, their head is not
    "after_reuse_index",  # the index is written, nothing is taken over
    "in_reuse_segment",  # a block of results is in the kernel, the job's other rows are not looked up
    "after_reuse",  # all of them are on disk, the ledger says validating
)
RETRY_POINTS = (  # a retry of a job with a folder
    "after_retry_plan",  # its plan is written, the job is as it was
    "after_retry_spec",  # so is job.json, the ledger says that the job has ended
    "after_retry",  # it is stored, and still recorded as begun
)
SPAN_POINTS = (  # rows that nodes check
    "after_span",  # what a node found is in the store, the owner does not know it
    "after_spans",  # the nodes have checked all rows, nothing is sealed
)
COPY_POINTS = (  # files that cells name, for workers that do not see them
    "after_copies",  # they are copied, their dataset has its seal and no plan
)
OBJECT_POINTS = (  # what is kept in an object store
    "before_put",  # outcomes are on the worker's disk, their object is not put
    "after_put",  # their object is put, no commit was sent
    "before_publish_objects",  # objects are announced, none is put
    "after_publish_objects",  # they are put, the database does not name them
)
START_POINTS = (  # the start of a run that becomes the owner
    "after_prepared",  # its lock is taken, and its first processes run; nothing is open
)
FILE_POINTS = (  # the same for a server's files
    "after_settle",  # a file's bytes are durable under its id, it has no record
    "after_forget",  # its record is deleted, its bytes remain
)
LOG_POINTS = (  # short files of a server, which the database makes durable: see `store.file_log`
    "in_file_record",  # its bytes are in the kernel, the transaction with them and its record is not committed
    "in_end",  # results are in the kernel, the transaction with them and the end of their job is not committed
    "in_adoption",  # a result has a second name, its record is not committed
    "after_files_synced",  # files are durable, the database still has their bytes
)
SECRET_POINTS = (  # the rotation of the key that encrypts secrets
    "after_key_file",  # the new key file is written, beside the old one
    "after_new_key",  # the new key file has replaced the old one, all secrets are under the old key
    "in_rewrap",  # one page of secrets is under the new key
    "after_rewrap",  # all secrets are under the new key, the old key remains
)
PROVIDER_POINTS = (  # a job whose rows go to a provider
    "before_note",  # outcomes are on their way to the owner, their note is not
    "after_note",  # an engine's note is durable with its lease, the engine does not know it yet
    "before_submit",  # the intent is noted, the provider does not have the job
    "after_submit",  # the provider has the job, its id is not known here
    "after_submit_noted",  # its id is noted, its state was not polled yet
)
MISFIT_POINTS = (  # answers in the results of a provider that do not fit their schema
    "before_counting",  # they were read, what they have cost is in memory
    "after_counting",  # that is in the kernel, nobody asks again yet
    "before_asking_again",  # the same; those that fit are on their way to the owner too
)
TASK_POINTS = (  # a task of ML Commons
    "after_task",  # the task is stored, its batch was not submitted
    "after_hand_over",  # the provider has the batch, the task does not have its id
    "after_task_job",  # the job of its dataset is stored, the task does not have its id
)
ADAPTER_POINTS = (  # the registration of an adapter
    "after_adapter_record",  # its version is stored, its files are not
    "after_adapter",  # its folder is complete, its version says fetching
)
DATASET_POINTS = (  # a named dataset
    "after_begin",  # the upload is expected, its link was not returned
    "after_arrival",  # its bytes and their record are durable, the client has no reply
    "after_name",  # it has its name, its rows were not checked
    "after_check",  # its rows were checked, the result is not stored
)
SALVAGE_POINTS = (  # the replacement of a damaged database
    "before_salvaged",  # the new database is complete, in the folder where it was made
    "after_salvaged",  # it is beside the old one
    "after_set_aside",  # the old one has a second name
    "after_strays",  # files without a record were moved to another folder
    "after_logs",  # the old one's log is deleted
)
RETENTION_POINTS = (  # a job that is removed, or reduced to its results
    "after_remove",  # its record is deleted, its files remain
    "after_ending",  # its record is beside its results, the ledger still has its segments
    "after_parts_dropped",  # the ledger does not have the segments any more, the files remain
    "after_plan_dropped",  # the plan is deleted first: a salvage recognises the job by the missing plan
    "after_clear",  # the files are deleted, and are still recorded as pending
)
BACKUP_POINTS = (
    "before_backup",  # the copy is complete, under a temporary name
    "after_backup",  # it has its final name, the oldest copy remains
)

_name, _, _rest = os.environ.get("BATCHMILL_FAULT", "").partition(":")
_count, _, _file = _rest.partition(":")
_left = int(_count or 1)
_signal = signal.Signals[os.environ.get("BATCHMILL_FAULT_SIGNAL", "SIGKILL")]


def point(name: str) -> None:
    """Kill or stop the process here if BATCHMILL_FAULT names this point."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        try:
            os.close(os.open(_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        os.kill(os.getpid(), _signal)
