"""What deployments of language models have to know of everything else that is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from batchmill.types import Caller, ModelSpec


class Around(Protocol):
    """What else there is that has names, and which adapters."""

    revision: int  # of adapters: rises with every change

    def holder(self, project: str, name: str) -> str:
        """Who has this name: "a model of the configuration"; empty: nobody."""

    def sees(self, caller: Caller, name: str) -> bool:
        """The caller may know that there is a model of this name."""

    def adapted(self, project: str, base: str, model: ModelSpec) -> ModelSpec:
        """A model with the adapters that a project registered for it and its base, and room for everybody's."""

    def limited(self, caller: Caller, model: ModelSpec, names: Sequence[str]) -> ModelSpec:
        """A model whose rows may use these names of its own, and those of its adapters that the caller may."""


class Nothing:
    """As `Around`, where nothing else is known."""

    revision = 0

    def holder(self, project: str, name: str) -> str:
        return ""

    def sees(self, caller: Caller, name: str) -> bool:
        return False

    def adapted(self, project: str, base: str, model: ModelSpec) -> ModelSpec:
        return model

    def limited(self, caller: Caller, model: ModelSpec, names: Sequence[str]) -> ModelSpec:
        return replace(model, allowed=[*names, *model.adapters, *model.adapter_names])
