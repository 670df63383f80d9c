"""Deployments of language models asked for by another process of this user, through the owner's control socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from msgspec import UNSET, Struct

from batchmill.services.llms import views
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.llms.service import LlmService
from batchmill.types import Caller, EngineEvent, EngineView, ModelSpec, Scope
from batchmill.types.poison import Suspect
from batchmill.wire.native_llms import LlmChange, LlmInfo, LlmList, NewLlm

Verb = Literal["show", "delete", "start", "stop"]


class _Create(Struct, frozen=True, tag="create"):
    project: str
    asked: NewLlm


class _Update(Struct, frozen=True, tag="update"):
    project: str
    name: str
    asked: LlmChange


class _Do(Struct, frozen=True, tag="do"):
    project: str
    verb: Verb
    name: str


class _List(Struct, frozen=True, tag="list"):
    project: str


class _Events(Struct, frozen=True, tag="events"):
    project: str
    name: str


class _Find(Struct, frozen=True, tag="find"):
    project: str
    name: str


class _Quarantine(Struct, frozen=True, tag="quarantine"):
    project: str | None  # None: everybody's
    digest: str | None
    clear: bool


_call = msgspec.msgpack.Decoder(_Create | _Update | _Do | _List | _Events | _Find | _Quarantine)
_pack = msgspec.msgpack.encode


class LlmDoor:
    """The owner's side: `answer` takes a message and gives the reply to it. Whoever asks runs this machine."""

    def __init__(self, llms: LlmService) -> None:
        self._llms = llms

    async def answer(self, message: bytes) -> bytes:
        llms = self._llms
        match _call.decode(message):
            case _Create(project, asked):
                made = await llms.create(
                    _caller(project), asked.name, views.settings_of(asked), description=asked.description,
                    is_trusted=True,
                )  # fmt: skip
                return _pack(self._info(made))
            case _Update(project, name, asked):
                return _pack(self._info(await change(llms, _caller(project), name, asked, is_trusted=True)))
            case _Do(project, "delete", name):
                return _pack(views.info(await llms.delete(_caller(project), name), EngineView()))
            case _Do(project, verb, name):
                return _pack(self._info(await self._do(_caller(project), verb, name)))
            case _List(project):
                who = _caller(project)
                return _pack(LlmList([self._info(each) for each in llms.list(who)], llms.bases.names(who)))
            case _Events(project, name):
                return _pack(llms.view(llms.get(_caller(project), name)).events)
            case _Find(project, name):
                found = llms.find(_caller(project), name)
                return _pack(None if found is None else found.model)
            case _Quarantine(project, digest, clear):
                return _pack(llms.quarantined(project, digest, clear=clear))

    async def _do(self, caller: Caller, verb: str, name: str) -> LlmDeployment:
        match verb:
            case "show":
                return self._llms.get(caller, name)
            case "start":
                return await self._llms.start(caller, name)
            case _:
                return await self._llms.stop(caller, name)

    def _info(self, deployment: LlmDeployment) -> LlmInfo:
        return views.info(deployment, self._llms.view(deployment))


class LlmClient:
    """The other side, over `tell`, which carries a message to the owner and its reply back.

    Raises: what `LlmService` raises.
    """

    def __init__(self, tell: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._tell = tell

    async def _ask(self, message: Struct, kind: object):
        return msgspec.msgpack.decode(await self._tell(_pack(message)), type=kind)

    async def create(self, project: str, asked: NewLlm) -> LlmInfo:
        return await self._ask(_Create(project, asked), LlmInfo)

    async def update(self, project: str, name: str, asked: LlmChange) -> LlmInfo:
        return await self._ask(_Update(project, name, asked), LlmInfo)

    async def list(self, project: str) -> LlmList:
        return await self._ask(_List(project), LlmList)

    async def show(self, project: str, name: str) -> LlmInfo:
        return await self._ask(_Do(project, "show", name), LlmInfo)

    async def delete(self, project: str, name: str) -> LlmInfo:
        return await self._ask(_Do(project, "delete", name), LlmInfo)

    async def start(self, project: str, name: str) -> LlmInfo:
        return await self._ask(_Do(project, "start", name), LlmInfo)

    async def stop(self, project: str, name: str) -> LlmInfo:
        return await self._ask(_Do(project, "stop", name), LlmInfo)

    async def events(self, project: str, name: str) -> list[EngineEvent]:
        return await self._ask(_Events(project, name), list[EngineEvent])

    async def quarantined(
        self, project: str | None, digest: str | None = None, *, clear: bool = False
    ) -> list[Suspect]:
        return await self._ask(_Quarantine(project, digest, clear), list[Suspect])

    async def find(self, project: str, name: str) -> ModelSpec | None:
        """The model of a deployment, as a job has it; None: there is none that is called so."""
        return await self._ask(_Find(project, name), ModelSpec | None)


async def change(
    llms: LlmService, caller: Caller, name: str, asked: LlmChange, *, is_trusted: bool = False
) -> LlmDeployment:
    """Change what `asked` says, and keep the rest."""
    settings = views.changed(llms.get(caller, name).settings, asked)
    told = asked.description
    return await llms.update(
        caller, name, settings, description=UNSET if told is UNSET else told, is_trusted=is_trusted
    )


def _caller(project: str) -> Caller:
    return Caller(project, Scope.ADMIN)
