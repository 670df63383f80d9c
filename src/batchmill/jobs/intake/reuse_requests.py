"""What each row of an earlier job asked for, and which target it went to.

The digests were stored when the dataset was sealed, or they are made anew from the results or the input.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batchmill.datasets import layout
from batchmill.datasets.checking.fan_out import validators
from batchmill.datasets.orders import SourcePart, ValidatedChunk
from batchmill.datasets.request_digests import canonical_of, digest_of
from batchmill.datasets.sealed import load_seal
from batchmill.errors import InputChanged
from batchmill.jobs.intake.preparation import seal_order
from batchmill.jobs.intake.reuse_orders import EarlierJob, read_keys, sum_of, target_keys
from batchmill.jobs.intake.reuse_results import HALF
from batchmill.jobs.intake.reuse_sections import WORDS
from batchmill.jobs.ledger.files import JobFiles
from batchmill.types import Seal
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.rows.forms import OpenAIForm, TableForm

KINDS = (np.uint64, np.uint16)  # of a digest's words, and of a target

Requests = tuple[np.ndarray, np.ndarray, list[str]]  # digests [n, 4], targets [n], and the keys of the targets


class StoredRequests(Struct, frozen=True):
    """The digest and the target of each row of a dataset."""

    digests: np.ndarray  # [rows, 4] u64
    targets: np.ndarray  # [rows] u16
    keys: list[str]  # of the targets
    deterministic: list[bool] = []  # of the targets

    def of(self, lines: Sequence[bytes], places: np.ndarray) -> Requests:
        """Those of results."""
        rows = (places[:, 2] >> HALF).astype(np.int64)
        return self.digests[rows], self.targets[rows], self.keys


class LineRequests:
    """The same from results of a function, which hold the columns of their rows: the input may have changed since."""

    def __init__(self, job: EarlierJob) -> None:
        self._added = frozenset(job.spec.form.reserved)
        self._keys = target_keys(job.spec)

    def of(self, lines: Sequence[bytes], places: np.ndarray) -> Requests:
        """Those of results."""
        data = b"".join(map(self._digest, lines))
        digests = np.frombuffer(data, np.uint64).reshape(-1, WORDS)
        return digests, np.zeros(len(lines), np.uint16), self._keys

    def _digest(self, line: bytes) -> bytes:
        members = {name: value for name, value in split_object(line).items() if name not in self._added}
        return digest_of("", canonical_of(join_object(members)), is_deterministic=False)


class NoRequests:
    """The same of a job of which nothing can be taken over."""

    def of(self, lines: Sequence[bytes], places: np.ndarray) -> Requests:
        return np.zeros((len(lines), WORDS), np.uint64), np.zeros(len(lines), np.uint16), [""]


def requests_of(job: EarlierJob, files: JobFiles, open_: ExitStack) -> StoredRequests | LineRequests | NoRequests:
    """The digests that were written when the dataset was sealed, or new ones."""
    found = read_requests(files.dataset)
    if found is not None:
        return found
    seal, form = load_seal(files.dataset), job.spec.form
    if seal.is_columnar or job.generation or job.spec.routing:  # rows ran with other models than the job has now
        return NoRequests()
    if isinstance(form, TableForm) and not form.makes_requests and len(job.spec.models) == 1:
        return LineRequests(job)
    return _digested(job, files, seal, open_)


def read_requests(dataset: Path) -> StoredRequests | None:
    """The digests of a dataset; None if it has none, or they are not what was written."""
    keys = read_keys(dataset)
    if keys is None:
        return None
    paths = dataset / layout.REQUESTS, dataset / layout.TARGET
    try:
        if [sum_of(path) for path in paths] != [keys.requests, keys.targets]:
            return None
        digests, targets = (np.memmap(path, kind, "r") for path, kind in zip(paths, KINDS, strict=True))
    except FileNotFoundError:
        return None
    return StoredRequests(digests.reshape(-1, WORDS), targets, keys.keys, keys.deterministic)


def _digested(job: EarlierJob, files: JobFiles, seal: Seal, open_: ExitStack) -> StoredRequests:
    """Read and check the rows again for their digests. Raises: InputChanged if they are not those that were sealed."""
    form = OpenAIForm() if seal.format == "openai" else TableForm()
    order = seal_order(job.spec)
    order = replace(order, form=order.form or form, files=seal.files, requests=True, keys=True, fold="none")
    parts = [SourcePart(number, file.path, file.path, 0, 0, file.size_bytes) for number, file in enumerate(seal.files)]
    place = JobFiles(Path(job.data_dir), job.spec.id).reuse
    columns = [open_.enter_context(tempfile.TemporaryFile(dir=place)) for _ in KINDS]  # noqa: SIM115
    sums, rows = [], 0
    with validators(order, sum(part.end for part in parts)) as validator:
        for _, chunk in validator.check(parts):
            if isinstance(chunk, ValidatedChunk):
                sums.append(chunk.checksums)
                rows += chunk.rows
                for file, column in zip(columns, (chunk.requests, chunk.keys[0]), strict=True):
                    file.write(column)
    if rows != seal.rows or b"".join(sums) != (files.dataset / layout.CHECKSUMS).read_bytes():
        raise InputChanged(f"the input of the job {job.spec.id} changed since it was sealed")
    for file in columns:
        file.flush()
    digests, targets = (np.memmap(file, kind, "r") for file, kind in zip(columns, KINDS, strict=True))
    return StoredRequests(digests.reshape(-1, WORDS), targets, target_keys(job.spec))
