"""Single calls through a connector, made by the owner itself: to begin a batch at a provider, look at it, cancel it.

The secrets of the connector are read for the call and kept by nobody. What a service replied is a value, whatever its
status; only a call that was never made raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

import batchmill
from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.children.programs import Programs
from batchmill.engines.connections import Connections, NoReply
from batchmill.engines.retry import MESSAGE_BYTES_MAX, FaultKind
from batchmill.errors import InvalidInput, ModelFailed, RateLimited
from batchmill.models import redaction, secrets
from batchmill.models.addresses import EVERYWHERE, Private
from batchmill.models.connectors.bounded import Processing, render_call
from batchmill.models.connectors.rendering import Rendered, Renderer
from batchmill.models.connectors.urls import find_action
from batchmill.ports import Clock
from batchmill.services.remote.connectors import Endpoints
from batchmill.services.secrets.vault import Vault
from batchmill.types import Connector, Limits
from batchmill.types.connectors import BATCH_PREDICT, Action, ClientConfig

CALLS_MAX = 128  # at once, of one owner; half of them of one project
CONNECTOR_CALLS_MAX = 16  # of these, through one connector: a service that hangs holds up no other
TIME_MAX_S = 300  # for connecting, and for reading: whatever a connector says
RETRY_TIME_MAX_S = 300.0  # for all calls of one action
BACKOFF_MAX_S = 30.0
POOLS_MAX = 64  # sets of connections with settings of their own
BACKOFF_MIN_S = 0.01
UNCERTAIN = (408, 409)  # refusals of a request that may have been taken all the same
THROTTLED = "throttlingexception"
EMPTY = "Remote service returned empty response body"
_decode = msgspec.json.Decoder().decode
Render = Callable[[Mapping[str, Any], Mapping[str, str]], Awaitable[Rendered]]


class RemoteReply(Struct, frozen=True):
    """What became of a call. `error` is empty where the service did as it was asked."""

    status: int  # the service's; where none came, what ML Commons says instead
    body: bytes = b""
    data: dict[str, Any] | None = None  # the reply as the action's post-processing leaves it, where it is an object
    error: str = ""  # without secrets, and bounded
    code: str = ""  # ours: remote_error, throttled, connection_failed, timeout, empty_reply …
    may_have_acted: bool = True  # False: the service has certainly not taken it

    @property
    def is_ok(self) -> bool:
        return not self.error


class _Pool(Struct):
    """Connections of one kind, and how many calls are made on them now."""

    connections: Connections
    calls: int = 0


class RemoteCalls:
    """
    Args:
        private: where connectors of callers may go besides the public internet.
        endpoints: what their URLs must look like.
        programs: where their templates are filled, and their replies are read.
    """

    def __init__(
        self, vault: Vault, clock: Clock, *, private: Private, endpoints: Endpoints, programs: Programs,
        chance: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._programs = programs
        self._vault, self._clock, self._private, self._endpoints = vault, clock, private, endpoints
        self._chance = chance or random.Random()
        self._places = FairSemaphore(CALLS_MAX)
        self._lanes: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # of connectors in use
        self._pools: dict[tuple[bool, bool, float, float], _Pool] = {}

    async def act(
        self, connector: Connector, kind: str, parameters: Mapping[str, Any], *, project: str = ""
    ) -> RemoteReply:
        """Make the call of an action, explicit or derived, and read its reply.

        Args:
            kind: an action type, or an action's name.
            parameters: laid over the connector's own, for this call alone.
            project: whose call it is.

        Raises: InvalidInput for an action that there is not, a placeholder that nothing fills, or a place that may not
        be called; TooComplex or RateLimited for templates that take too long; ModelFailed for a missing credential.
        """
        action = find_action(connector, kind)
        credentials = await self._credentials(connector)
        async with contextlib.AsyncExitStack() as entered:
            await self._enter(entered, connector, project)
            reply = await self._tried(
                connector, action, self._renderer(project, connector, action), parameters, credentials
            )
        return await self._processed(project, connector, action, reply, parameters)

    async def _enter(self, entered: contextlib.AsyncExitStack, connector: Connector, project: str) -> None:
        """A place among the calls that are made. Raises: RateLimited where none is free for too long."""
        lane = self._lanes.setdefault(connector.id, asyncio.Semaphore(CONNECTOR_CALLS_MAX))
        wait_s = min((connector.client_config or ClientConfig()).connection_timeout, TIME_MAX_S)
        try:
            async with asyncio.timeout(wait_s):
                await entered.enter_async_context(lane)
                await entered.enter_async_context(self._places.place(project))
        except TimeoutError:
            raise RateLimited(
                f"Error communicating with remote model: Acquire operation took longer than {wait_s:g} s: "
                f"{CONNECTOR_CALLS_MAX} calls through {connector.id} are under way, or {CALLS_MAX} in all",
                code="connection_pool_exhausted",
                retry_after_s=1.0,
            ) from None

    def _renderer(self, project: str, connector: Connector, action: Action) -> Render:
        """What fills the templates of an action: in a child, where a caller wrote them."""
        if not connector.is_trusted:
            return partial(render_call, self._programs, project, connector, action)
        renderer = Renderer(connector, action)

        async def render(parameters: Mapping[str, Any], credentials: Mapping[str, str]) -> Rendered:
            return renderer.render(parameters, credentials)

        return render

    async def _credentials(self, connector: Connector) -> dict[str, str]:
        kept = {key: text for key, text in connector.credential.items() if text.startswith("secret:")}
        revealed = await self._vault.reveal_all(text.removeprefix("secret:") for text in kept.values())
        found = {key: revealed[text.removeprefix("secret:")] for key, text in kept.items()}
        for key, text in connector.credential.items():
            if key not in kept:
                if not connector.is_trusted:
                    raise ModelFailed(f"the credential {key} of {connector.name!r} is no secret of its own")
                found[key] = (await asyncio.to_thread(secrets.resolve, text, key=key)).reveal()
        return found

    async def _tried(
        self, connector: Connector, action: Action, render: Render, parameters: Mapping[str, Any],
        credentials: Mapping[str, str],
    ) -> RemoteReply:  # fmt: skip
        """Call as often as the connector's client_config says, and as may be without asking for the same twice."""
        config = connector.client_config or ClientConfig()
        until = self._clock.monotonic() + min(config.retry_timeout_seconds, RETRY_TIME_MAX_S)
        hidden = [value for key, value in credentials.items() if key not in redaction.OPEN]
        calls = 0
        while True:
            rendered = await render(parameters, credentials)  # anew: a signature has its moment
            if not connector.is_trusted:
                self._endpoints.check_url(rendered.url)
            reply = await self._call(connector, config, rendered, hidden)
            calls += 1
            is_last = config.max_retry_times != -1 and calls > config.max_retry_times
            if reply.is_ok or is_last or not _may_repeat(action, reply):
                return reply
            wait_s = self._backoff_s(config, calls)
            if self._clock.monotonic() + wait_s > until:
                return reply
            await self._clock.sleep(wait_s)

    def _backoff_s(self, config: ClientConfig, calls: int) -> float:
        """Source: the policies of the AWS SDK that ML Commons names."""
        base = max(config.retry_backoff_millis / 1000, BACKOFF_MIN_S)
        if config.retry_backoff_policy == "constant":
            return min(base, BACKOFF_MAX_S)
        ceiling = min(base * 2.0 ** min(calls - 1, 30), BACKOFF_MAX_S)
        if config.retry_backoff_policy == "exponential_full_jitter":
            return self._chance.uniform(0, ceiling)
        return ceiling / 2 + self._chance.uniform(0, ceiling / 2)

    async def _call(
        self, connector: Connector, config: ClientConfig, rendered: Rendered, hidden: Sequence[str]
    ) -> RemoteReply:
        pool = await self._pool(connector.is_trusted, config)
        pool.calls += 1
        try:
            response, body = await pool.connections.exchange(
                rendered.method, rendered.url, rendered.body, headers=rendered.headers
            )
        except NoReply as failed:
            return _unanswered(failed)
        finally:
            pool.calls -= 1
        if body is None:
            return RemoteReply(502, error="the reply of the remote service is too large", code="reply_too_large")
        body = redaction.without(body, hidden)  # replies are kept and shown, whatever a service repeats in them
        is_throttled = THROTTLED in response.headers.get("x-amzn-errortype", "").lower()
        return _answered(response.status, body, is_throttled, says_when="retry-after" in response.headers)

    async def _processed(
        self, project: str, connector: Connector, action: Action, reply: RemoteReply, parameters: Mapping[str, Any]
    ) -> RemoteReply:
        """The reply with what its action makes of it."""
        if not reply.is_ok:
            return reply
        if not reply.body.strip():
            if action.action_type == "CANCEL_BATCH_PREDICT":
                return reply
            return msgspec.structs.replace(reply, status=502, error=EMPTY, code="empty_reply")
        processing = Processing(connector, self._programs)
        try:
            answer = await processing.output_json(action, reply.body, parameters, who=project)
        except (InvalidInput, RateLimited):  # no such reply as the action waits for: who asked decides what that means
            return reply
        output = _decode(answer)
        data = output[0].get("dataAsMap") if output else None
        return msgspec.structs.replace(reply, data=data if isinstance(data, dict) else None)

    async def _pool(self, is_trusted: bool, config: ClientConfig) -> _Pool:
        """Connections with the settings of a connector; others share them that have the same."""
        read_s, connect_s = (
            float(max(1, min(each, TIME_MAX_S))) for each in (config.read_timeout, config.connection_timeout)
        )
        key = (is_trusted, not config.skip_ssl_verification, read_s, connect_s)
        pool = self._pools.pop(key, None)
        if pool is None:
            limits = Limits(connect_timeout_s=connect_s, attempt_timeout_s=read_s + connect_s)
            private = EVERYWHERE if is_trusted else self._private
            agent = {"User-Agent": f"batchmill/{batchmill.__version__}"}
            pool = _Pool(Connections(limits, headers=agent, private=private, verify_tls=key[1], read_timeout_s=read_s))
            await pool.connections.start()
        self._pools[key] = pool  # the one that was used last stands last
        idle = [each for each, other in self._pools.items() if not other.calls and other is not pool]
        for each in idle[: max(0, len(self._pools) - POOLS_MAX)]:
            await self._pools.pop(each).connections.stop()
        return pool

    async def close(self) -> None:
        """End every connection."""
        while self._pools:
            await self._pools.popitem()[1].connections.stop()


def _may_repeat(action: Action, reply: RemoteReply) -> bool:
    """A batch is begun again only where it certainly has not been."""
    if reply.status != 429 and reply.status < 500:
        return False
    return action.action_type != BATCH_PREDICT or not reply.may_have_acted


def _unanswered(failed: NoReply) -> RemoteReply:
    """Raises: InvalidInput where the place may not be called at all."""
    fault = failed.fault
    if fault.error.code in ("url_not_allowed", "invalid_url"):
        raise InvalidInput(redaction.mask(fault.error.message), code=fault.error.code)
    return RemoteReply(
        500,
        error=f"Error communicating with remote model: {_shown(fault.error.message)}",
        code=fault.error.code,
        may_have_acted=fault.kind is not FaultKind.UNREACHABLE,
    )


def _answered(status: int, body: bytes, is_throttled: bool, *, says_when: bool) -> RemoteReply:
    """Source: ML Commons' handler of replies. Beyond it: 300 is a redirect, and none is followed.

    Args:
        says_when: it says when to come again. A 503 that does not may be a proxy's, whose service went away half-way.
    """
    if 200 <= status < 300 and not is_throttled:
        return RemoteReply(status, body)
    if 300 <= status < 400:
        error = f"Error from remote service: it answered {status}, and redirects are not followed"
        return RemoteReply(502, body, error=error, code="remote_error", may_have_acted=False)
    error = f"Error from remote service: {_shown(body.decode(errors='replace'))}"
    if is_throttled:
        return RemoteReply(429, body, error=error, code="throttled", may_have_acted=False)
    is_sure = status == 503 and says_when
    may_have_acted = status in UNCERTAIN or (status >= 500 and not is_sure)
    return RemoteReply(status, body, error=error, code="remote_error", may_have_acted=may_have_acted)


def _shown(text: str) -> str:
    """A text of others that may be told: without secrets, and bounded."""
    text = redaction.mask(text)
    data = text.encode(errors="replace")
    return text if len(data) <= MESSAGE_BYTES_MAX else data[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"
