"""The models of the configuration, and the base models that it offers: resolved when somebody needs them.

A base model is what a deployment or a job may be made of: a language model of the configuration, one of
`deployments.base_models`, an id of a model hub. Never a path that a caller names.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from msgspec.structs import replace

from batchmill.config import Config, ModelEntry
from batchmill.errors import BatchmillError, InvalidConfig, UnknownName
from batchmill.models import registry
from batchmill.types import Caller, ModelSpec, Price
from batchmill.types.engine_traits import ENGINES, LLM

KIND = ENGINES[LLM].configured_as  # of base models that only have a name or an id of a hub
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
SHOWN_CHARS = 120
MEDIA_FLAG, NO_HOST = "allowed-media-domains", "media.invalid"  # a name that no host can have: RFC 2606


class ConfiguredModels:
    def __init__(self, config: Config) -> None:
        self.config, self._entry = config, config.deployments
        self.names = list(config.models)
        self.base_names = list(self._entry.base_models)  # that are models of nothing else
        self._specs: dict[str, ModelSpec] = {}

    def adapters(self, name: str) -> list[str]:
        """What the configuration calls the adapters of one of its models."""
        return list(self.config.models[name].adapters)

    def check(self) -> None:
        """Resolve all that have names.

        Raises: InvalidConfig, naming the model and the file, where one cannot be, or a name stands for two.
        """
        holders: dict[str, str] = {}
        for name in self.names:
            self._checked(f"models.{name}", name)
            for own in (name, *self.adapters(name)):
                if (other := holders.setdefault(own, name)) != name:
                    raise self.flaw(f"models.{name}", f"the name {own!r} is taken by models.{other}")
        for name in self.base_names:
            if (other := holders.get(name)) is not None and name not in self.config.models:
                raise self.flaw(f"deployments.base_models.{name}", f"the name {name!r} is taken by models.{other}")
            self._checked(f"deployments.base_models.{name}", name)

    def _checked(self, place: str, name: str) -> None:
        try:
            self.get(name)
        except BatchmillError as error:
            raise self.flaw(place, error.message, error.code) from None

    def flaw(self, place: str, message: str, code: str | None = None) -> InvalidConfig:
        """What is wrong with an entry, with the file that it is in."""
        file = f"{self.config.file}: " if self.config.file is not None else ""
        return InvalidConfig(f"{file}{place}: {message}", **({} if code is None else {"code": code}))

    def get(self, name: str) -> ModelSpec:
        """A model of the configuration or a base model, as a server has it, whoever may use it.

        Raises: UnknownName (`unknown_base_model`) where the configuration has it no more; InvalidInput.
        """
        if name not in self._specs:
            if name not in self.config.models and not self.is_base(name):
                raise UnknownName(
                    f"the configuration offers no base model {name[:SHOWN_CHARS]!r} any more", code="unknown_base_model"
                )
            self._specs[name] = served_here(self._resolve(name), self.config)
        return self._specs[name]

    # -- base models --------------------------------------------------------------------------------------------------

    def bases(self, caller: Caller) -> list[str]:
        """Those that have names, of which this caller may use them; ids of a hub are not listed."""
        return [name for name in (*self.language_models(), *self.base_names) if self.allows(caller, name)]

    def language_models(self) -> list[str]:
        """Those of the configuration."""
        return [name for name, entry in self.config.models.items() if _is_base(entry)]

    def base(self, caller: Caller, name: str) -> ModelSpec:
        """Raises: UnknownName (`unknown_base_model`), alike for what is not there and what the caller may not use."""
        if not self.offers(caller, name):
            raise self._unknown(caller, name)
        return self.get(name)

    def offers(self, caller: Caller, name: str) -> bool:
        """It is a base model that this caller may use."""
        return self.allows(caller, name) and self.is_base(name)

    def is_base(self, name: str) -> bool:
        """Somebody may deploy it."""
        if name in self.config.models:
            return _is_base(self.config.models[name])
        if name in self._entry.base_models:
            return True
        is_id = HUB_ID.fullmatch(name) is not None and ".." not in name
        # A folder beside the server that is called like an id would be loaded in its place.
        is_folder = is_id and any((place / name).exists() for place in (Path(), self.config.base))
        return is_id and self._entry.offers(name) and not is_folder

    # -- who may ------------------------------------------------------------------------------------------------------

    def allows(self, caller: Caller, name: str, *, is_function: bool = False) -> bool:
        """Both the key and its project allow this very name."""
        return (caller.models is None or name in caller.models) and self.lists(caller.project, name, is_function)

    def lists(self, project: str, name: str, is_function: bool = False) -> bool:
        """The project may use what has this name: a project without a list may use all."""
        entry = self.config.projects.get(project)
        if entry is None:
            return True
        listed = entry.functions if is_function and entry.functions is not None else entry.models
        return listed is None or name in listed

    def _resolve(self, name: str) -> ModelSpec:
        cwd = self.config.base
        if name in self.config.models:
            return registry.resolve(name, self.config, cwd=cwd)
        source = self._entry.base_models.get(name, name)
        return replace(registry.resolve(f"{KIND}:{source}", self.config, cwd=cwd), name=name)

    def _unknown(self, caller: Caller, name: str) -> UnknownName:
        known = self.bases(caller)
        near = difflib.get_close_matches(name[:SHOWN_CHARS], known, n=1)
        if near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"there are {', '.join(known)}" if known else "the server offers none by name"
            hint += self._hub_hint()
        return UnknownName(
            f"there is no base model {name[:SHOWN_CHARS]!r} that you may use: {hint}", code="unknown_base_model"
        )

    def _hub_hint(self) -> str:
        patterns = self._entry.hub_models
        return f", and ids of a model hub that fit {', '.join(patterns)}" if patterns else ""


def _is_base(entry: ModelEntry) -> bool:
    kind = registry.KINDS.get(entry.engine)
    return kind is not None and kind.traits.serves_base_models


def served_here(model: ModelSpec, config: Config) -> ModelSpec:
    """A model of the configuration as a server has it. Others than language models of our own stay as they are.

    Its engine fetches no image or video that a caller names: it stands inside, the caller may not. Media inside a
    request are taken. `engine_args = { allowed-media-domains = "example.com" }` opens a host.
    """
    if not model.traits.serves_base_models:
        return model
    entry = config.deployments
    args = model.engine_args
    if not any(name.replace("_", "-") == MEDIA_FLAG for name in args):
        args = {**args, MEDIA_FLAG: NO_HOST}
    price = Price.of(entry.default_price) if model.price is None else model.price
    return replace(model, engine_args=args, price=price, adapter_patterns=list(entry.adapter_patterns))
