"""What sealing adds to the rows of a table: prompts of a template, and the media that cells name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from batchmill.datasets.conversion import Converted
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.media.adding import MediaAdder
from batchmill.datasets.orders import KeepMedia, SealOrder
from batchmill.datasets.templates.renderer import TemplateRenderer
from batchmill.types import PromptTemplate
from batchmill.wire.rows.forms import TableForm


class RowAdditions:
    """The additions of one form. Processes that render end with the context."""

    def __init__(
        self, order: SealOrder, form: TableForm, columns: list[str], home: Path, keep: KeepMedia | None = None
    ) -> None:
        """Raises: InvalidDataset if a template does not fit the columns."""
        self._ending = ExitStack()
        self._renderer: TemplateRenderer | None = None
        if form.template is not None:
            self._renderer = self._ending.enter_context(_renderer(order, form, form.template))
            try:
                self._renderer.check(columns)
            except BaseException:
                self._ending.close()
                raise
        self._media = MediaAdder(form.media, order.dataset, home, keep) if form.media else None

    def __enter__(self) -> RowAdditions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    def add(self, pieces: Iterator[Converted], source: SourceFile) -> Iterator[Converted]:
        """Yield the pieces of a source with the additions to their rows."""
        are_whole_lines = source.format != "jsonl"
        if self._renderer is not None:
            pieces = self._renderer.render(pieces, are_whole_lines=are_whole_lines)
            are_whole_lines = True
        return pieces if self._media is None else self._media.add(pieces, source, are_whole_lines=are_whole_lines)


def _renderer(order: SealOrder, form: TableForm, template: PromptTemplate) -> TemplateRenderer:
    names_others = bool(form.media or form.template_columns())  # rows differ though the template may be constant
    return TemplateRenderer(
        template, may_be_constant=form.may_be_constant or names_others,
        line_bytes_max=order.dataset.line_bytes_max, processes=order.processes,
    )  # fmt: skip
