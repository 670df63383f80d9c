"""What tests of segments share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from batchmill.store.segments.files import SegmentFolder


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SegmentFolder]:
    """The segments in a test's folder."""
    with closing(SegmentFolder(tmp_path)) as folder:
        yield folder
