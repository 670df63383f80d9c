"""Result files of lines, plain or compressed. Loaded by every owner: it imports neither numpy nor pyarrow."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zstandard

from batchmill.jobs.results.results import ResultFile, errors_path, output_kind
from batchmill.part_files import Digest, HeldFile, PartFile, remove_files

GZIP_LEVEL, ZSTD_LEVEL = 5, 3


class _Compressor(Protocol):
    def compress(self, data: bytes) -> bytes: ...

    def flush(self) -> bytes: ...


class LineFile:
    """Lines on their way to a file; `.gz` and `.zst` are compressed. The same writes give the same bytes.

    Args: digest: is updated with the bytes of the file. file: takes them instead.
    """

    def __init__(self, path: Path, digest: Digest | None = None, *, file: HeldFile | None = None) -> None:
        self.path, self.rows = path, 0
        self._compressor = _compressor(output_kind(path)[1])
        self._file = PartFile(path, digest=digest) if file is None else file

    def write(self, data: bytes | memoryview, rows: int) -> None:
        """Append `rows` whole lines; the caller leaves their bytes as they are."""
        self.rows += rows
        self._file.write(data if self._compressor is None else self._compressor.compress(data))

    def flush(self) -> None:
        """Hand everything written so far to the kernel."""
        self._file.flush()

    def publish(self) -> ResultFile:
        if self._compressor is not None:
            self._file.write(self._compressor.flush())
        self._file.publish()
        return ResultFile(str(self.path), self.rows, self._file.size_bytes)

    def check(self) -> None:
        """As `PartFile.check`."""
        self._file.check()

    def discard(self) -> None:
        self._file.discard()


class ResultLines:
    """Finished lines in row order: one file, or with `errors_apart` the rows that failed in a file of their own."""

    def __init__(self, output: Path, errors_apart: bool, *, held: list[HeldFile] | None = None) -> None:
        """Args: held: gets the files, which are not written then; None: they are."""
        self.ok = self.failed = 0
        self._held = held
        self._errors_apart = errors_apart
        self.output = output
        self._errors_path = errors_path(output)
        self._lines = self._new_file(output)
        self._errors: LineFile | None = None

    def write(self, data: bytes | memoryview, rows: int, *, ok: bool) -> None:
        """Append lines that are all ok or all errors."""
        self.ok += rows if ok else 0
        self.failed += 0 if ok else rows
        self._file(ok).write(data, rows)

    def write_window(self, lines: Sequence[bytes], failed: Sequence[int]) -> None:
        """Append lines in row order; `failed` are the indexes of those that are errors, ascending."""
        self.ok += len(lines) - len(failed)
        self.failed += len(failed)
        if failed and self._errors_apart:
            self._file(ok=False).write(b"".join([lines[index] for index in failed]), len(failed))
            skip = set(failed)
            lines = [line for index, line in enumerate(lines) if index not in skip]
        self._lines.write(b"".join(lines), len(lines))

    def flush(self) -> None:
        """Hand everything written so far to the kernel."""
        for file in filter(None, (self._lines, self._errors)):
            file.flush()

    def publish(self) -> tuple[ResultFile, ResultFile | None]:
        """(output, error file or None). The output comes last: who sees it sees everything."""
        errors = None
        self._lines.check()  # the errors of a later generation may have been published since, or be gone
        if self._errors is not None:
            errors = self._errors.publish()
        elif self._errors_apart:
            remove_files([self._errors_path])  # of an earlier generation
        return self._lines.publish(), errors

    def discard(self) -> None:
        """Drop what was not published."""
        self._lines.discard()
        if self._errors is not None:
            self._errors.discard()

    def _file(self, ok: bool) -> LineFile:
        if ok or not self._errors_apart:
            return self._lines
        if self._errors is None:
            self._errors = self._new_file(self._errors_path)
        return self._errors

    def _new_file(self, path: Path) -> LineFile:
        if self._held is None:
            return LineFile(path)
        self._held.append(HeldFile(path))
        return LineFile(path, file=self._held[-1])


def _compressor(suffix: str) -> _Compressor | None:
    if suffix == ".gz":
        return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)  # a gzip header without a time
    if suffix == ".zst":
        return zstandard.ZstdCompressor(ZSTD_LEVEL, write_checksum=True).compressobj()
    return None
