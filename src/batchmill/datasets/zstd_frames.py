"""Decompresses zstd frames in blocks of bounded size. The only module that imports zstandard."""

from __future__ import annotations

from collections.abc import Iterator

import zstandard

from batchmill.errors import InvalidDataset

SLICE_BYTES = 512  # zstd packs at most 128 KiB into 4 bytes: a slice unpacks to 16 MiB at most
WINDOW_BYTES_MAX = 128 * 1024 * 1024


def frames(path: str, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the contents of the frames in `raw`. Raises: InvalidDataset (`invalid_zstd`)."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    frame, within = decompressor.decompressobj(), False
    for data in raw:
        view = memoryview(data)
        while view:
            within = True
            try:
                block = frame.decompress(view[:SLICE_BYTES])
            except zstandard.ZstdError as error:
                raise InvalidDataset(f"{path} is damaged: {error}", code="invalid_zstd") from None
            if block:
                yield block
            used = min(SLICE_BYTES, len(view))
            if frame.eof:
                used -= len(frame.unused_data)
                frame, within = decompressor.decompressobj(), False
            view = view[used:]
    if within:
        raise InvalidDataset(f"{path} ends in the middle of its zstd data", code="invalid_zstd")
