"""Shards, leases, and what makes an outcome count."""

from __future__ import annotations

from msgspec import Struct

from batchmill.types.rows import Usage


class Shard(Struct, frozen=True):
    """Plan positions lo <= p < hi, all of model number `model` of the job."""

    number: int
    lo: int
    hi: int
    model: int


class Lease(Struct, frozen=True):
    """The right to record outcomes for a shard; a higher epoch ends every lower one."""

    job: str
    generation: int
    shard: int
    epoch: int


class SegmentRef(Struct, frozen=True):
    """Bytes of a segment that are durable: one or more whole blocks of one shard."""

    segment: str
    offset: int
    length: int


class Commit(Struct, frozen=True):
    """What a worker asks the ledger to count. `done` packs the positions: see `store.segments.pack_positions`."""

    lease: Lease
    seq: int
    ref: SegmentRef
    done: bytes
    rows_ok: int
    rows_failed: int
    usage: Usage
    errors: dict[str, int] = {}  # error code -> rows
    samples: dict[str, str] = {}  # error code -> one message


class LedgerReport(Struct, frozen=True):
    """What an audit of a job's ledger found. `broken` is empty for a sound one."""

    job: str
    rows: int
    rows_done: int
    commits: int
    segments: int
    bytes: int
    adopted: int = 0  # rows that a rebuild found and the ledger did not know
    reopened: int = 0  # rows that the ledger counted and a rebuild could not read: they run again
    damaged: list[str] = []  # what a rebuild could not read
    broken: list[str] = []


class SalvagedTable(Struct, frozen=True):
    """What became of one table of a database that was damaged."""

    name: str
    rows: int  # that could be read
    from_backup: int = 0  # rows that could not, and that a backup had
    is_damaged: bool = False


class SalvageReport(Struct, frozen=True):
    """What was made of a damaged database."""

    is_sound: bool  # nothing had to be done
    tables: list[SalvagedTable] = []
    backup: str | None = None  # the one that rows were taken from, if any were missing
    rebuilt: list[str] = []  # jobs whose ledger was made anew; they are paused
    failed: list[str] = []  # jobs that could not be had: which, and why
    moved: list[str] = []  # what lay on the disk without a record
    damaged: str | None = None  # the folder with the files that were replaced
