"""Inputs that are copied to the dataset before they are read: files of web servers.

They are fetched in the child process that seals. A file stays until the rows are planned, so that a job that was
interrupted fetches only the rest of it; one that rows are read from stays with the dataset.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.datasets import formats, inflate, layout
from batchmill.datasets.formats import FIRST_BYTES_MAX, FORMATS, MAGIC, kind
from batchmill.datasets.orders import check_disk
from batchmill.errors import BatchmillError, InputChanged, InvalidDataset, OverQuota, TooLarge
from batchmill.models.addresses import read_private, read_url
from batchmill.optional import require
from batchmill.types import DatasetSpec, Seal, SealedFile
from batchmill.wire.input_urls import file_name, is_fetched, is_web_url, shown
from batchmill.wire.native import SealReport

FETCH_URL = "batchmill.models.downloads:fetch"
TIME_S, PREVIEW_TIME_S = 24 * 3600.0, 600.0  # a preview of a caller holds one of few slots
READ_HEAD = "batchmill.models.downloads:read_head"
PURPOSE = "an input of a web server"
HEAD_BYTES, HEAD_GROWTH = 256 * 1024, 16  # of a file whose first row is looked at; more if the row is longer
FETCH_SHARE = 0.5  # of the progress


class Bounds(Struct, frozen=True):
    """How much may be written: `bytes_left` of the project's disk quota; None: no quota. `time_s` is for each file."""

    bytes_left: int | None
    no_space_message: str
    time_s: float = TIME_S


class Fetched(Struct, frozen=True):
    """The inputs of a dataset once they are on this machine. `sources`: path -> the file as its caller named it."""

    home: Path
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
        layout.write_seal(self.home, seal)
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
            kept = {file.path for file in msgspec.json.decode((self.home / layout.SEAL).read_bytes(), type=Seal).files}
            _remove(self.home, kept)


def clear(home: Path) -> None:
    """Remove what was fetched for a dataset that is refused."""
    _remove(home, set())


def _remove(home: Path, kept: set[str]) -> None:
    for path in home.glob(layout.FETCHED):
        if str(path) not in kept:
            path.unlink(missing_ok=True)


def check(spec: DatasetSpec) -> None:
    """Check the URLs of a dataset; reads nothing. Raises: InvalidInput (`url_not_allowed`)."""
    for url in filter(is_web_url, spec.paths):
        read_url(url, read_private(spec.private_hosts))


def fetch(spec: DatasetSpec, home: Path, bounds: Bounds, progress: Callable[[float], None]) -> Fetched:
    """Fetch the inputs that lie elsewhere into `home`, or the rest of them. Returns at once if there are none.

    Raises: InvalidInput, StorageFailed, StorageFull, TooLarge, OverQuota.
    """
    wanted = [number for number, path in enumerate(spec.paths) if is_fetched(path)]
    paths, sources, before = list(spec.paths), {}, 0
    for at, number in enumerate(wanted):
        url = spec.paths[number]
        target = home / (layout.FETCHED.replace("*", f"{number:06d}") + _suffixes(url))

        def check_size(size_bytes: int, before: int = before) -> None:
            _check_size(spec, bounds, before + size_bytes)
            check_disk(home)

        def show(share: float, at: int = at) -> None:
            progress((at + share) / len(wanted))

        found = require(FETCH_URL, PURPOSE)(
            url, target, spec.private_hosts, bounds.time_s, check_size, show
        )  # fmt: skip
        paths[number] = str(target)
        sources[str(target)] = SealedFile(url, found.size_bytes, 0, 0, found.etag)
        before += found.size_bytes
    return Fetched(home, paths, sources)


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
        for url in spec.paths:
            path = _write_head(url, spec, Path(folder))
            if path.stat().st_size:
                break
        try:
            return formats.detect_format(replace(spec, paths=[str(path)]))
        except InvalidDataset as error:
            raise InvalidDataset(error.message.replace(str(path), shown(url)), code=error.code) from None


def _write_head(url: str, spec: DatasetSpec, folder: Path) -> Path:
    """Write the first lines of a file, unpacked, or all of it if it is small."""
    size, suffixes = HEAD_BYTES, _suffixes(url)
    path = folder / f"head{suffixes}"
    while True:
        data, is_whole = require(READ_HEAD, PURPOSE)(url, spec.private_hosts, size)
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
