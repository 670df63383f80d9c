"""Files of data sets of a model hub. Needs huggingface_hub, with its variables HF_ENDPOINT and HF_HUB_OFFLINE.

The library finds the token by itself: in HF_TOKEN, or where `hf auth login` stored it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, hf_raise_for_status

from batchmill.errors import AuthRefused, BatchmillError, InvalidDataset, StorageFailed
from batchmill.wire.input_urls import HUB_DATASETS, HubFile

INFO_S = 60.0  # timeout for the list of a data set's files
KIND = "dataset"
EMPTY = 416  # the status of a range of an empty file


def list_files(file: HubFile) -> tuple[str, list[str]]:
    """The commit of the revision now, and the paths of its files.

    Raises: InvalidDataset, AuthRefused, StorageFailed.
    """
    with _translated(file):
        info = HfApi().dataset_info(file.repository, revision=file.revision or None, timeout=INFO_S)
        return str(info.sha), [each.rfilename for each in info.siblings or ()]


def read_head(file: HubFile, size_bytes: int) -> tuple[bytes, bool]:
    """The first bytes of a file, and whether they are all of it. Raises: as `list_files`."""
    with _translated(file):
        url = hf_hub_url(file.repository, file.path, repo_type=KIND, revision=file.revision)
        headers = build_hf_headers() | {"Range": f"bytes=0-{size_bytes - 1}"}
        reply = get_session().get(url, headers=headers, timeout=INFO_S)
        if reply.status_code == EMPTY:
            return b"", True
        hf_raise_for_status(reply)
    whole = reply.headers.get("Content-Range", "").rpartition("/")[2]
    return reply.content[:size_bytes], (int(whole) if whole.isdigit() else len(reply.content)) <= size_bytes


def read_size(file: HubFile) -> int:
    """The size of a file at a commit; 0 if the hub does not say. Raises: as `list_files`."""
    with _translated(file):
        url = hf_hub_url(file.repository, file.path, repo_type=KIND, revision=file.revision)
        return get_hf_file_metadata(url, timeout=INFO_S).size or 0


def fetch(file: HubFile, work: Path) -> Path:
    """Download a file at a commit, without a bound. Returns where it is, complete and durable, in the folder `work`.

    The library goes on with what an earlier attempt left there.
    Raises: as `list_files`.
    """
    disable_progress_bars()
    with _translated(file):
        place = {"repo_type": KIND, "revision": file.revision}
        done = Path(hf_hub_download(file.repository, file.path, local_dir=work, **place))
    fd = os.open(done, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return done


@contextmanager
def _translated(file: HubFile) -> Iterator[None]:
    try:
        yield
    # HTTPError: of the HTTP library that this version of huggingface_hub uses, and the base of the hub's own errors.
    except (hub_errors.HTTPError, hub_errors.EntryNotFoundError, hub_errors.HFValidationError, OSError) as error:
        raise _translate(file, error) from None


def _translate(file: HubFile, error: Exception) -> BatchmillError:
    """Convert an error of the hub's library. Its messages contain no token."""
    name, hub = f"{HUB_DATASETS}{file.repository}", constants.ENDPOINT
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, hub_errors.GatedRepoError):
        return AuthRefused(
            f"{name} is gated: request access to it at {hub}, and log in with `hf auth login` or HF_TOKEN",
            code="hub_refused",
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return InvalidDataset(
            f"the hub {hub} has no {name}, or it is private: check the name, and log in with `hf auth login` or "
            "HF_TOKEN",
            code="no_such_url",
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return InvalidDataset(f"{name} has no revision {file.revision!r}", code="no_such_url")
    if constants.HF_HUB_OFFLINE:
        return InvalidDataset(f"{name} cannot be read: HF_HUB_OFFLINE forbids it", code="hub_offline")
    is_unreachable = isinstance(error, hub_errors.LocalEntryNotFoundError)
    if isinstance(error, hub_errors.EntryNotFoundError | FileNotFoundError) and not is_unreachable:
        return InvalidDataset(f"{name} has no file {file.path!r}", code="no_such_url")
    if isinstance(error, hub_errors.HFValidationError):
        return InvalidDataset(f"{name} is not a data set of a hub: {message}", code="invalid_url")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return AuthRefused(
            f"the hub refused {name} ({status}): log in with `hf auth login` or HF_TOKEN", code="hub_refused"
        )
    return StorageFailed(
        f"{name} cannot be read from {hub}: {message}; try again, or resume the job", code="hub_unavailable"
    )
