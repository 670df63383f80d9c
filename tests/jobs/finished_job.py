"""A job whose rows have run: a sealed dataset, its plan, and segments with whatever outcomes a test wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealing import SealOrder, seal
from batchmill.jobs.ledger.plan import PlanOrder, PlanReader, ShardRows, make, plan_again
from batchmill.jobs.results.results import GatherOrder
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import BlockMeta, BlockRows, SegmentHead, error_meta, frame
from batchmill.types import DatasetSpec, Outcome, Row, RowError, SegmentPlace, SegmentRef, Usage
from batchmill.wire.rows.forms import OpenAIForm, TableForm


def quiet(_: float) -> None:
    """Take progress and do nothing with it."""


class FinishedJob:
    def __init__(
        self, folder: Path, source: Path | list[Path], form: OpenAIForm | TableForm, *, keys: bool = False,
        columnar: bool = False,
    ) -> None:  # fmt: skip
        self.home, self.form = folder, form
        self.dataset, self.plan, self.segments = folder / "dataset", folder / "plan-0", folder / "segments"
        for path in (self.dataset, self.plan, self.segments):
            path.mkdir(parents=True)
        self.plans = [self.plan]
        order = SealOrder(
            dataset=DatasetSpec(list(map(str, source if isinstance(source, list) else [source]))),
            form=form if isinstance(form, TableForm) and form.prompt else None,
            targets={"m": (0, 0)}, keys=keys, fold="all" if keys else "none", may_be_columnar=columnar,
        )  # fmt: skip
        seal(order, self.dataset, quiet)
        make(PlanOrder(targets=[(0, None)], shard_rows=[ShardRows(1000)], keys=keys), self.dataset, self.plan, quiet)
        rows = open_rows(self.dataset)
        self.raws = rows.read(0, rows.rows)
        rows.close()
        self.committed: list[tuple[int, SegmentRef]] = []
        self._segments = 0

    @property
    def leaders(self) -> list[int]:
        """Row number by position, of the newest generation."""
        reader = PlanReader(self.plans[-1])
        return list(reader.row_numbers(0, reader.leaders))

    def again(self, rows: Iterable[int]) -> None:
        """Open another generation over these rows."""
        wanted, home = set(rows), self.home / f"plan-{len(self.plans)}"
        home.mkdir()
        plan_again(PlanReader(self.plan), partial(filter, wanted.__contains__), [ShardRows(1000)], home)
        self.plans.append(home)

    def line(self, number: int, failed: bool = False, text: str = "done") -> bytes:
        """The finished line of a row that ran."""
        row = Row(position=0, number=number, raw=self.raws[number], form=self.form)
        if failed:
            return self.form.write(Outcome(row, error=RowError("went_wrong", f"row {number}"), status=0))
        body = b'{"answer":"%s %d","usage":{"prompt_tokens":3}}' % (text.encode(), number)
        return self.form.write(Outcome(row, body))

    def block(self, positions: Sequence[int], failed: bool = False, text: str = "done", epoch: int = 1) -> bytes:
        """A block of outcomes, all ok or all errors, in the order of `positions`."""
        numbers = self.leaders
        rows = [numbers[position] for position in positions]
        part = BlockRows(list(positions), rows, [self.line(row, failed, text) for row in rows])
        meta = error_meta([RowError("went_wrong", "")] * len(rows), Usage()) if failed else BlockMeta()
        return frame(part, generation=len(self.plans) - 1, shard=0, epoch=epoch, ok=not failed, meta=meta)

    def commit(self, *blocks: bytes) -> SegmentRef:
        """Write blocks to a segment of their own and count them."""
        self._segments += 1
        file = SegmentFile(self.segments, SegmentHead("job", "identity", f"w{self._segments}"))
        ref = file.append(b"".join(blocks))
        file.close()
        self.committed.append((len(self.plans) - 1, ref))
        return ref

    def run_all(self, failed: Iterable[int] = (), text: str = "done") -> None:
        """Run every position of the newest plan, in one commit; `failed` are row numbers."""
        numbers, bad = self.leaders, set(failed)
        good = [position for position, number in enumerate(numbers) if number not in bad]
        rest = [position for position, number in enumerate(numbers) if number in bad]
        self.commit(*[self.block(part, kind, text) for part, kind in ((good, False), (rest, True)) if part])

    def order(self, output: Path, *, unrun: RowError | None = None) -> GatherOrder:
        return GatherOrder(
            dataset=str(self.dataset), plans=list(map(str, self.plans)), segments=SegmentPlace(str(self.segments)),
            committed=self.committed, form=self.form, output=str(output), unrun=unrun,
        )  # fmt: skip


def write_requests(path: Path, contents: Sequence[str]) -> Path:
    """An OpenAI batch file with one chat row for each content."""
    line = '{"custom_id":"c%d","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"content":"%s"}]}}\n'
    path.write_text("".join(line % (number, content) for number, content in enumerate(contents)))
    return path
