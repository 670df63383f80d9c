"""Results in an object store: written to the job's folder first, and uploaded when they are complete.

An object appears when it is whole. The error file is uploaded before the results: who sees those sees everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from batchmill.errors import StorageFailed, Unavailable
from batchmill.jobs.results.results import Manifest, ResultFile, errors_of
from batchmill.object_store.urls import open_store, parse_url
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import PatientTerm, files_term_at, term_at

if TYPE_CHECKING:
    from batchmill.object_store.store import ObjectStore

UPLOAD = "batchmill.jobs.results.object_results:upload_offloaded"


class UploadOrder(Struct, frozen=True):
    manifest: Manifest  # of files of this machine
    output: str  # the URL of the results
    errors_apart: bool
    term: str  # see `Term.path`: of objects


def upload_offloaded(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: UploadOrder in, the Manifest of the objects out, both as JSON. Removes the files."""
    request = msgspec.json.decode(order, type=UploadOrder)
    try:
        manifest = upload(request, progress)
    except Unavailable as error:
        raise StorageFailed(f"the results cannot be uploaded: {error.message}; then resume the job") from None
    return msgspec.json.encode(manifest)


def upload(order: UploadOrder, progress: Callable[[float], None]) -> Manifest:
    """Upload what was published, the output last. It can run again after a crash."""
    manifest = order.manifest
    store = open_store(parse_url(order.output).root, term=term_at(order.term))
    errors_url = errors_of(order.output)
    errors = None
    if manifest.errors is not None:
        errors = _put(store, manifest.errors, errors_url)
        progress(0.1)
    elif order.errors_apart:
        store.delete(parse_url(errors_url).key)  # of an earlier generation
    output = _put(store, manifest.output, order.output)
    files = filter(None, (manifest.errors, manifest.output))
    OwnedFiles(PatientTerm(files_term_at(order.term))).remove(*(Path(file.path) for file in files))
    return msgspec.structs.replace(manifest, output=output, errors=errors)


def _put(store: ObjectStore, file: ResultFile, url: str) -> ResultFile:
    store.put_file(parse_url(url).key, Path(file.path), overwrite=True)
    return msgspec.structs.replace(file, path=url)
