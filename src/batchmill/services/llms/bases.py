"""What a deployment or a job may be made of: language models of the configuration, its aliases, ids of a model hub.

Never a path that a caller names.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from msgspec.structs import replace

from batchmill.config import Config
from batchmill.errors import BatchmillError, InvalidConfig, UnknownName
from batchmill.models import registry
from batchmill.types import Caller, ModelSpec, Price

ENGINE, KIND = "llm", "vllm"  # inside, and as the configuration calls it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
SHOWN_CHARS = 120
MEDIA_FLAG, NO_HOST = "allowed-media-domains", "media.invalid"  # a name that no host can have: RFC 2606


class Bases:
    """The base models of a configuration. They are resolved when somebody asks for them."""

    def __init__(self, config: Config) -> None:
        self._config, self._projects, self._entry = config, config.projects, config.deployments
        self._found: dict[str, ModelSpec] = {}

    def names(self, caller: Caller) -> list[str]:
        """Those that have names, of which this caller may use them; ids of a hub are not listed."""
        return [name for name in (*self.configured(), *self._entry.base_models) if self.may(caller, name)]

    def configured(self) -> list[str]:
        """The language models of the configuration."""
        return [name for name, entry in self._config.models.items() if entry.engine == KIND]

    def check(self) -> None:
        """Resolve all that have names. Raises: InvalidConfig for what the configuration calls by a name and is not."""
        for name in self._entry.base_models:
            try:
                self.get(name)
            except BatchmillError as error:
                place = f"{self._config.file}: " if self._config.file is not None else ""
                raise InvalidConfig(
                    f"{place}deployments.base_models.{name}: {error.message}", code=error.code
                ) from None

    def find(self, caller: Caller, name: str) -> ModelSpec:
        """Raises: UnknownName (`unknown_base_model`), alike for what is not there and what the caller may not use."""
        if not self.offers(caller, name):
            raise self._unknown(caller, name)
        return self.get(name)

    def get(self, name: str) -> ModelSpec:
        """A base model, whoever may use it. Raises: InvalidInput where the configuration offers it no more."""
        if not self.is_base(name):
            raise UnknownName(
                f"the configuration offers no base model {name[:SHOWN_CHARS]!r} any more", code="unknown_base_model"
            )
        if name not in self._found:
            self._found[name] = served_here(self._resolve(name), self._config)
        return self._found[name]

    def may(self, caller: Caller, name: str) -> bool:
        """Both the key and its project allow this very name."""
        project = self._projects.get(caller.project)
        allowed = None if project is None else project.models
        return (caller.models is None or name in caller.models) and (allowed is None or name in allowed)

    def offers(self, caller: Caller, name: str) -> bool:
        """It is a base model that this caller may use."""
        return self.may(caller, name) and self.is_base(name)

    def is_base(self, name: str) -> bool:
        """Somebody may deploy it."""
        if name in self._config.models:
            return self._config.models[name].engine == KIND
        if name in self._entry.base_models:
            return True
        is_id = HUB_ID.fullmatch(name) is not None and ".." not in name
        # A folder beside the server that is called like an id would be loaded in its place.
        is_folder = is_id and any((place / name).exists() for place in (Path(), self._config.base))
        return is_id and self._entry.offers(name) and not is_folder

    def _resolve(self, name: str) -> ModelSpec:
        cwd = self._config.base
        if name in self._config.models:
            return registry.resolve(name, self._config, cwd=cwd)
        source = self._entry.base_models.get(name, name)
        return replace(registry.resolve(f"{KIND}:{source}", self._config, cwd=cwd), name=name)

    def _unknown(self, caller: Caller, name: str) -> UnknownName:
        known = self.names(caller)
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


def served_here(model: ModelSpec, config: Config) -> ModelSpec:
    """A model of the configuration as a server has it. Others than language models of our own stay as they are.

    Its engine fetches no image or video that a caller names: it stands inside, the caller may not. Media inside a
    request are taken. `engine_args = { allowed-media-domains = "example.com" }` opens a host.
    """
    if model.engine != ENGINE:
        return model
    entry = config.deployments
    args = model.engine_args
    if not any(name.replace("_", "-") == MEDIA_FLAG for name in args):
        args = {**args, MEDIA_FLAG: NO_HOST}
    price = Price.of(entry.default_price) if model.price is None else model.price
    return replace(model, engine_args=args, price=price, adapter_patterns=list(entry.adapter_patterns))
