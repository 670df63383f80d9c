"""CountedCommits: what the ledger has counted of the only run of a small job, from which its results are written."""

from __future__ import annotations

from batchmill.types import Commit, SegmentRef

BYTES_MAX = 64 * 1024  # of one job: as many jobs as there are turns may run at once

# (generation, range) of every commit, and the blocks that they carried: segment -> (offset, bytes)
Results = tuple[list[tuple[int, SegmentRef]], dict[str, list[tuple[int, bytes]]]]


class CountedCommits:
    """The commits of a run that began when nothing was counted, as `Ledger.results` would read them."""

    def __init__(self) -> None:
        self.rows = 0
        self._bytes = 0
        self._refs: list[SegmentRef] = []
        self._blocks: dict[str, list[tuple[int, bytes]]] = {}

    def add(self, commit: Commit) -> None:
        """Remember a commit, unless its job's commits carry too much: then none of them is kept any more."""
        self.rows += commit.rows_ok + commit.rows_failed
        self._bytes += len(commit.blocks)
        if self._bytes > BYTES_MAX:
            self._refs, self._blocks = [], {}
            return
        self._refs.append(commit.ref)
        if commit.blocks:
            self._blocks.setdefault(commit.ref.segment, []).append((commit.ref.offset, commit.blocks))

    def has_all(self, rows: int) -> bool:
        """Whether every commit of a run of so many rows is remembered."""
        return self.rows == rows and self._bytes <= BYTES_MAX

    def results_with(self, commit: Commit, rows: int) -> Results | None:
        """As `results` once this commit is added; None unless that is every commit of a run of so many rows."""
        after = CountedCommits()
        after.rows, after._bytes, after._refs = self.rows, self._bytes, list(self._refs)
        after._blocks = {segment: list(blocks) for segment, blocks in self._blocks.items()}
        after.add(commit)
        return after.results() if after.has_all(rows) else None

    def results(self) -> Results:
        """As `Ledger.results`."""
        refs = sorted(self._refs, key=lambda ref: (ref.segment, ref.offset))
        return [(0, ref) for ref in refs], self._blocks
