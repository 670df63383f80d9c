"""Language models that batchmill serves itself, as callers ask for them."""

from __future__ import annotations

from msgspec import Struct

from batchmill.types.models import Needs, Scaling


class LlmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A base model and how its engine is to run."""

    base_model: str  # a model of the configuration, or an id of a model hub that it allows
    engine_args: dict[str, str | int | float | bool] = {}  # flags of the engine that callers may set
    hf_token: str | None = None  # "secret:NAME": what the engine shows a model hub
    scaling: Scaling = Scaling()
    needs: Needs = Needs()  # 0: as the base model
    takes_adapters: bool = True
    preloaded_adapters: list[str] = []  # names of adapters that are in the engine before anybody asks for them
