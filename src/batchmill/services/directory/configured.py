"""The models of the configuration and the base models that it offers. Each one is resolved on first use.

A base model is what a deployment or a job can be made from: a language model of the configuration, an entry of
`deployments.base_models`, or an id of a model hub. It is never a path that a caller names.
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

KIND = ENGINES[LLM].configured_as  # the engine of base models that have only a name or a hub id
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
SHOWN_CHARS = 120
MEDIA_FLAG, NO_HOST = "allowed-media-domains", "media.invalid"  # RFC 2606: no host can have this name


class ConfiguredModels:
    def __init__(self, config: Config) -> None:
        self.config, self._deployments = config, config.deployments
        self.names = list(config.models)
        self.base_names = list(self._deployments.base_models)  # entries of `deployments.base_models`
        self._specs: dict[str, ModelSpec] = {}

    def adapters(self, name: str) -> list[str]:
        """Return the names of the adapters that the configuration gives one of its models."""
        return list(self.config.models[name].adapters)

    def check(self) -> None:
        """Resolve every model that has a name.

        Raises: InvalidConfig, with the model and the file, if one cannot be resolved or two share a name.
        """
        owners: dict[str, str] = {}
        for name in self.names:
            self._check_one(f"models.{name}", name)
            for own_name in (name, *self.adapters(name)):
                if (owner := owners.setdefault(own_name, name)) != name:
                    raise self.config_error(f"models.{name}", f"the name {own_name!r} is taken by models.{owner}")
        for name in self.base_names:
            if (owner := owners.get(name)) is not None and name not in self.config.models:
                raise self.config_error(
                    f"deployments.base_models.{name}", f"the name {name!r} is taken by models.{owner}"
                )
            self._check_one(f"deployments.base_models.{name}", name)

    def _check_one(self, path: str, name: str) -> None:
        try:
            self.get(name)
        except BatchmillError as error:
            raise self.config_error(path, error.message, error.code) from None

    def config_error(self, path: str, message: str, code: str | None = None) -> InvalidConfig:
        """Return the error for an entry of the configuration, with the file that the entry is in."""
        file = f"{self.config.file}: " if self.config.file is not None else ""
        return InvalidConfig(f"{file}{path}: {message}", **({} if code is None else {"code": code}))

    def get(self, name: str) -> ModelSpec:
        """Return a model of the configuration or a base model as the server runs it. It does not check permissions.

        Raises: UnknownName (`unknown_base_model`) if the configuration no longer has it; InvalidInput.
        """
        if name not in self._specs:
            if name not in self.config.models and not self.is_base(name):
                raise UnknownName(
                    f"the configuration no longer has a base model {name[:SHOWN_CHARS]!r}", code="unknown_base_model"
                )
            self._specs[name] = as_served(self._resolve(name), self.config)
        return self._specs[name]

    # -- base models --------------------------------------------------------------------------------------------------

    def bases(self, caller: Caller) -> list[str]:
        """Return the named base models that this caller may use. Hub ids are not listed."""
        return [name for name in (*self.language_models(), *self.base_names) if self.allows(caller, name)]

    def language_models(self) -> list[str]:
        """Return the language models of the configuration."""
        return [name for name, entry in self.config.models.items() if _is_base(entry)]

    def base(self, caller: Caller, name: str) -> ModelSpec:
        """Return a base model that this caller may use.

        Raises: UnknownName (`unknown_base_model`), with the same message for a model that does not exist and for one
        that the caller may not use.
        """
        if not self.offers(caller, name):
            raise self._unknown(caller, name)
        return self.get(name)

    def offers(self, caller: Caller, name: str) -> bool:
        """Tell whether this is a base model that the caller may use."""
        return self.allows(caller, name) and self.is_base(name)

    def is_base(self, name: str) -> bool:
        """Tell whether this is a base model: a model that can be deployed."""
        if name in self.config.models:
            return _is_base(self.config.models[name])
        if name in self._deployments.base_models:
            return True
        is_id = HUB_ID.fullmatch(name) is not None and ".." not in name
        # The engine would load a local folder with the same name as the id instead of the hub's model.
        is_folder = is_id and any((folder / name).exists() for folder in (Path(), self.config.base))
        return is_id and self._deployments.offers(name) and not is_folder

    # -- permissions --------------------------------------------------------------------------------------------------

    def allows(self, caller: Caller, name: str, *, is_function: bool = False) -> bool:
        """Tell whether the key and its project both allow this exact name."""
        return (caller.models is None or name in caller.models) and self.lists(caller.project, name, is_function)

    def lists(self, project: str, name: str, is_function: bool = False) -> bool:
        """Tell whether the project may use this name. A project without a list may use every name."""
        entry = self.config.projects.get(project)
        if entry is None:
            return True
        listed = entry.functions if is_function and entry.functions is not None else entry.models
        return listed is None or name in listed

    def _resolve(self, name: str) -> ModelSpec:
        cwd = self.config.base
        if name in self.config.models:
            return registry.resolve(name, self.config, cwd=cwd)
        source = self._deployments.base_models.get(name, name)
        return replace(registry.resolve(f"{KIND}:{source}", self.config, cwd=cwd), name=name)

    def _unknown(self, caller: Caller, name: str) -> UnknownName:
        usable = self.bases(caller)
        matches = difflib.get_close_matches(name[:SHOWN_CHARS], usable, n=1)
        if matches:
            hint = f"did you mean {matches[0]!r}?"
        else:
            hint = f"there are {', '.join(usable)}" if usable else "the server offers none by name"
            hint += self._hub_hint()
        return UnknownName(
            f"there is no base model {name[:SHOWN_CHARS]!r} that you may use: {hint}", code="unknown_base_model"
        )

    def _hub_hint(self) -> str:
        patterns = self._deployments.hub_models
        return f", and ids of a model hub that fit {', '.join(patterns)}" if patterns else ""


def _is_base(entry: ModelEntry) -> bool:
    kind = registry.KINDS.get(entry.engine)
    return kind is not None and kind.traits.serves_base_models


def as_served(model: ModelSpec, config: Config) -> ModelSpec:
    """Return a model of the configuration as the server runs it. Only language models of this server change.

    The engine does not fetch images or videos by URL, because it may reach an internal network that the caller may not
    reach. Media inside a request are accepted. `engine_args = { allowed-media-domains = "example.com" }` allows a host.
    """
    if not model.traits.serves_base_models:
        return model
    entry = config.deployments
    args = model.engine_args
    if not any(name.replace("_", "-") == MEDIA_FLAG for name in args):
        args = {**args, MEDIA_FLAG: NO_HOST}
    price = Price.of(entry.default_price) if model.price is None else model.price
    return replace(model, engine_args=args, price=price, adapter_patterns=list(entry.adapter_patterns))
