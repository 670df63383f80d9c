"""The secrets of a connector as its engine holds them: read where they lie, and again once they have changed."""

from __future__ import annotations

from collections.abc import Mapping

from batchmill.errors import ModelFailed
from batchmill.models import provisions, secrets


class Credentials:
    """`values` by name. `generation` is another number for other values."""

    def __init__(self, references: Mapping[str, str]) -> None:
        self._references = references
        self.values: dict[str, str] = {}
        self.generation = 0
        self._provided = -1  # the provision that they were read with

    def load(self) -> None:
        """Read all of them. Raises: ModelFailed for one that is missing."""
        self._provided = provisions.version()
        found = {name: secrets.resolve(reference, key=name).reveal() for name, reference in self._references.items()}
        if found != self.values:
            self.values = found
            self.generation += 1

    def refresh(self) -> None:
        """Read them again if the owner has given others meanwhile. Raises: as `load`."""
        if provisions.version() != self._provided:
            self.load()

    def has_better(self, generation: int) -> bool:
        """Whether a call that was refused with values of this generation may be made with others.

        Variables and files are read again: a rotated key needs no restart.
        """
        if generation == self.generation:
            try:
                self.load()
            except ModelFailed:  # gone meanwhile: the refusal says more than that
                return False
        return generation != self.generation
