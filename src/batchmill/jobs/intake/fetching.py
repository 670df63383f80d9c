"""Inputs that are copied to the dataset before they are read: files of web servers, and of data sets of a hub.

They are fetched in the child process that seals. A file stays until the rows are planned, so that a job that was
interrupted fetches only the rest of it; one that rows are read from stays with the dataset.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from glob import has_magic
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.datasets import formats, inflate, layout, sources
from batchmill.datasets.folders import Folder, Home, folder_of
from batchmill.datasets.formats import FIRST_BYTES_MAX, FORMATS, MAGIC, kind
from batchmill.datasets.orders import check_disk
from batchmill.errors import BatchmillError, InputChanged, InvalidDataset, InvalidInput, OverQuota, TooLarge
from batchmill.models.addresses import read_private, read_url
from batchmill.models.worker_environment import PROXIES, chosen
from batchmill.optional import require
from batchmill.types import DatasetSpec, Seal, SealedFile
from batchmill.wire.input_urls import file_name, is_fetched, is_hub_url, is_web_url, parse_hub_url, shown
from batchmill.wire.native import SealReport

FETCH_URL = "batchmill.models.downloads:fetch"
TIME_S, PREVIEW_TIME_S = 24 * 3600.0, 600.0  # a preview of a caller holds one of few slots
READ_HEAD = "batchmill.models.downloads:read_head"
PURPOSE = "an input of a web server"
LIST_HUB = "batchmill.models.hub_datasets:list_files"
FETCH_FROM_HUB = "batchmill.jobs.intake.hub_fetching:fetch"  # which needs an event loop
READ_HUB_HEAD = "batchmill.models.hub_datasets:read_head"
HUB_PURPOSE = "an input of a model hub (hf://)"
HUB_VARIABLES = ("HF_*", "HUGGING_FACE_*", *PROXIES)  # that a child does not get otherwise
HEAD_BYTES, HEAD_GROWTH = 256 * 1024, 16  # of a file whose first row is looked at; more if the row is longer
FETCH_SHARE = 0.5  # of the progress
HEADS_MAX, DETECTED_S = 4, 30.0  # files whose first row is looked at, and for how long another one is begun


class Bounds(Struct, frozen=True):
    """How much may be written: `bytes_left` of the project's disk quota; None: no quota. `time_s`: for all files."""

    bytes_left: int | None
    no_space_message: str
    time_s: float = TIME_S


class Fetched(Struct, frozen=True):
    """The inputs of a dataset once they are on this machine. `sources`: path -> the file as its caller named it."""

    folder: Folder
    paths: list[str]
    sources: dict[str, SealedFile]

    def as_named(self, text: str) -> str:
        """A message about the files, with the URLs that the caller named."""
        for path, source in self.sources.items():
            text = text.replace(path, shown(source.path))
        return text

    def error(self, error: BatchmillError) -> BatchmillError:
        return type(error)(self.as_named(error.message), code=error.code)

    def named(self, report: SealReport) -> SealReport:
        """The report of sealing with the caller's URLs. Stores them in the seal, too."""
        if not self.sources:
            return report
        seal = replace(report.seal, sources=[self.sources.get(each.path, each) for each in report.seal.sources])
        layout.write_seal(self.folder, seal)
        shown_seal = replace(seal, files=[self.sources.get(each.path, each) for each in seal.files])
        problems = [
            replace(each, path=self._url_of(each.path), message=self.as_named(each.message)) for each in report.problems
        ]
        return replace(report, seal=shown_seal, problems=problems)

    def _url_of(self, path: str) -> str:
        return self.sources[path].path if path in self.sources else path

    def tidy(self) -> None:
        """Remove the files that no row is read from, once the dataset is planned."""
        if self.sources:
            kept = {file.path for file in msgspec.json.decode(self.folder.read(layout.SEAL), type=Seal).files}
            _remove(self.folder.on_disk(), kept)


def clear(home: Path) -> None:
    """Remove what was fetched for a dataset that is refused."""
    _remove(home, set())


def _remove(home: Path, kept: set[str]) -> None:
    for path in home.glob(layout.FETCHED):
        if path.is_dir():
            shutil.rmtree(path)
        elif str(path) not in kept:
            path.unlink(missing_ok=True)


def check(spec: DatasetSpec) -> None:
    """Check the URLs of a dataset; reads nothing. Raises: InvalidInput (`url_not_allowed`)."""
    for url in filter(is_web_url, spec.paths):
        read_url(url, read_private(spec.private_hosts))


def find_in_hub(pattern: str, leave_out: Collection[str] = ()) -> list[str]:
    """The URLs of the files that an hf:// URL names or matches, as `formats.resolve`, pinned to the commit of now.

    Raises: InvalidInput; AuthRefused, StorageFailed.
    """
    file = parse_hub_url(pattern)
    commit, names = require(LIST_HUB, HUB_PURPOSE, InvalidInput)(file)
    is_folder = not file.path or file.path.endswith("/")
    if is_folder:
        found = [name for name in names if "/" not in name.removeprefix(file.path) and name.startswith(file.path)]
        found = [name for name in found if formats.is_dataset_name(name.removeprefix(file.path))]
    elif has_magic(file.path):
        found = [name for name in names if sources.matches(file.path.split("/"), name.split("/"))]
    else:
        found = [name for name in names if name == file.path]
    urls = sorted(url for name in found if (url := file.at(commit, name)) not in leave_out)
    if not urls:
        missing = "holds no file with the suffix of a dataset" if is_folder else "names or matches no file"
        raise InvalidDataset(f"{pattern} {missing}", code="no_input")
    return urls


def hub_variables(spec: DatasetSpec) -> dict[str, str]:
    """The variables that the hub is reached with, for a child process. The token among them is in no description."""
    return chosen(os.environ, HUB_VARIABLES) if any(map(is_hub_url, spec.paths)) else {}


def fetch(spec: DatasetSpec, home: Home, bounds: Bounds, progress: Callable[[float], None]) -> Fetched:
    """Fetch the inputs that lie elsewhere into `home`, or the rest of them. Returns at once if there are none.

    The folder is asked before each change of a file whether it may be made: a download may outlast the owner's term.

    Raises: InvalidInput, StorageFailed, StorageFull, TooLarge, OverQuota.
    """
    folder = folder_of(home)
    wanted = [number for number, path in enumerate(spec.paths) if is_fetched(path)]
    paths, named, before = list(spec.paths), {}, 0
    deadline = time.monotonic() + bounds.time_s
    for at, number in enumerate(wanted):
        url = spec.paths[number]
        target = folder.on_disk() / (layout.FETCHED.replace("*", f"{number:06d}") + _suffixes(url))

        def check_size(size_bytes: int, before: int = before) -> None:
            _check_size(spec, bounds, before + size_bytes)
            check_disk(folder.on_disk())

        def show(share: float, at: int = at) -> None:
            progress((at + share) / len(wanted))

        left_s = max(0.0, deadline - time.monotonic())
        if is_hub_url(url):
            file = parse_hub_url(url)
            size_bytes, etag = require(FETCH_FROM_HUB, HUB_PURPOSE)(file, target, left_s, check_size), file.revision
        else:
            done = require(FETCH_URL, PURPOSE)(url, target, spec.private_hosts, left_s, check_size, show)
            size_bytes, etag = done.size_bytes, done.etag
        paths[number], named[str(target)] = str(target), SealedFile(url, size_bytes, 0, 0, etag)
        before += size_bytes
    return Fetched(folder, paths, named)


def _check_size(spec: DatasetSpec, bounds: Bounds, size_bytes: int) -> None:
    if bounds.bytes_left is not None and size_bytes > bounds.bytes_left:
        raise OverQuota(bounds.no_space_message)
    if size_bytes > spec.download_bytes_max:
        raise TooLarge(
            f"the inputs to download have more than {spec.download_bytes_max:,} bytes: name fewer, or raise "
            "limits.download_bytes_max",
            code="download_too_large",
        )


def _suffixes(url: str) -> str:
    """Those of a URL that name its format."""
    name = Path(file_name(url).lower())
    known = kind(name.name)
    return "".join(name.suffixes[-(2 if known[1] and known[0] else 1) :]) if known != (None, None) else ""


# -- before a job exists -----------------------------------------------------------------------------------------------


def detect_format(spec: DatasetSpec) -> str:
    """As `formats.detect_format`. Of a fetched file only the first bytes are read, where its name is not enough.

    Raises: also InvalidInput, StorageFailed.
    """
    check(spec)
    here = [path for path in spec.paths if not is_fetched(path)]
    if here or not spec.paths:
        return formats.detect_format(replace(spec, paths=here))
    if spec.format in FORMATS:
        return spec.format
    named = kind(file_name(spec.paths[0]).lower())[0]
    if named in formats.CONVERTED:
        return named
    with tempfile.TemporaryDirectory(prefix="batchmill-head-") as folder:
        deadline = time.monotonic() + DETECTED_S
        for url in spec.paths[:HEADS_MAX]:
            path = _write_head(url, spec, Path(folder))
            if path.stat().st_size or time.monotonic() > deadline:
                break
        if not path.stat().st_size and url != spec.paths[-1]:
            raise InvalidDataset(
                f"{shown(url)} and what is named before it are empty: name a file with rows first, or the format",
                code="unknown_format",
            )
        try:
            return formats.detect_format(replace(spec, paths=[str(path)]))
        except InvalidDataset as error:
            raise InvalidDataset(error.message.replace(str(path), shown(url)), code=error.code) from None


def _write_head(url: str, spec: DatasetSpec, folder: Path) -> Path:
    """Write the first lines of a file, unpacked, or all of it if it is small."""
    size, suffixes = HEAD_BYTES, _suffixes(url)
    path = folder / f"head{suffixes}"
    while True:
        data, is_whole = _read_head(url, spec, size)
        path.write_bytes(data)
        codec = next((name for magic, name in MAGIC if data.startswith(magic)), None)
        if is_whole or codec == "parquet" or size >= FIRST_BYTES_MAX:
            return path
        lines = _unpacked(path, codec).rpartition(b"\n")[0]
        if lines.strip():
            break
        size *= HEAD_GROWTH
    path = folder / f"head{suffixes.removesuffix('.gz').removesuffix('.zst')}"
    path.write_bytes(lines + b"\n")
    return path


def _read_head(url: str, spec: DatasetSpec, size: int) -> tuple[bytes, bool]:
    if is_hub_url(url):
        return require(READ_HUB_HEAD, HUB_PURPOSE)(parse_hub_url(url), size)
    return require(READ_HEAD, PURPOSE)(url, spec.private_hosts, size)


def _unpacked(path: Path, codec: str | None) -> bytes:
    """What the beginning of a packed file holds."""
    pieces = []
    with suppress(InvalidDataset):  # it is cut off
        for piece in inflate.blocks(str(path), codec, lambda _: None):
            pieces.append(piece)
            if sum(map(len, pieces)) > FIRST_BYTES_MAX:
                break
    return b"".join(pieces)


def kept(spec: DatasetSpec, home: Path) -> DatasetSpec:
    """The dataset with the files that were fetched for it. Raises: InputChanged if one was not kept."""
    paths = list(spec.paths)
    for number, url in enumerate(spec.paths):
        if is_fetched(url):
            found = sorted(home.glob(layout.FETCHED.replace("*", f"{number:06d}*")))
            if len(found) != 1:
                raise InputChanged(f"{shown(url)} was fetched once and not kept: start over with --restart")
            paths[number] = str(found[0])
    return replace(spec, paths=paths)
