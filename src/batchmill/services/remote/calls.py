"""Single calls through a connector by the owner process: to start, poll or cancel a batch at a provider.

The connector's secrets are read for each call and not kept. A reply of any status is a return value. Only a call that
was never made raises. aiohttp, which is slow to import, is imported for the first call.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

import batchmill
from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.children.programs import Programs
from batchmill.engines.retry import MESSAGE_BYTES_MAX, FaultKind, NoReply
from batchmill.errors import InvalidInput, ModelFailed, RateLimited
from batchmill.models import redaction, secrets
from batchmill.models.addresses import EVERYWHERE, Private
from batchmill.models.connectors.bounded import Processing, render_call
from batchmill.models.connectors.rendering import Rendered, Renderer
from batchmill.models.connectors.urls import find_action
from batchmill.optional import require
from batchmill.ports.clock import Clock
from batchmill.services.remote.connectors import Endpoints
from batchmill.services.secrets.vault import Vault
from batchmill.types import Connector, Limits
from batchmill.types.connectors import BATCH_PREDICT, Action, ClientConfig

if TYPE_CHECKING:
    from batchmill.engines.connections import Connections

CONNECTIONS = "batchmill.engines.connections:Connections"  # it needs aiohttp
CALLS_MAX = 128  # concurrent calls of one owner; a project gets half of them at most
CONNECTOR_CALLS_MAX = 16  # concurrent calls through one connector, so that a hanging service delays no other
TIME_MAX_S = 300  # upper bound of a connector's connect and read timeouts
RETRY_TIME_MAX_S = 300.0  # for all calls of one action
BACKOFF_MAX_S = 30.0
POOLS_MAX = 64  # connection pools with different settings
BACKOFF_MIN_S = 0.01
UNCERTAIN = (408, 409)  # statuses after which the service may have accepted the request all the same
THROTTLED = "throttlingexception"
EMPTY_REPLY = "Remote service returned empty response body"
_decode = msgspec.json.Decoder().decode
Render = Callable[[Mapping[str, Any], Mapping[str, str]], Awaitable[Rendered]]


class RemoteReply(Struct, frozen=True):
    """The result of a call. `error` is empty after success."""

    status: int  # of the service; without a reply, the status that ML Commons returns
    body: bytes = b""
    data: dict[str, Any] | None = None  # the reply after the action's post-processing, if it is an object
    error: str = ""  # without secrets, and truncated
    code: str = ""  # ours: remote_error, throttled, connection_failed, timeout, empty_reply …
    may_have_acted: bool = True  # False: the service has certainly not accepted the request

    @property
    def is_ok(self) -> bool:
        return not self.error


class _Pool(Struct):
    """Connections with the same settings, and how many calls use them now."""

    connections: Connections
    calls: int = 0


class RemoteCalls:
    """
    Args:
        private: private addresses that callers' connectors may use besides the public internet.
        endpoints: checks their URLs.
        programs: child processes that render their templates and read their replies.
    """

    def __init__(
        self, vault: Vault, clock: Clock, *, private: Private, endpoints: Endpoints, programs: Programs,
        chance: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._programs = programs
        self._vault, self._clock, self._private, self._endpoints = vault, clock, private, endpoints
        self._chance = chance or random.Random()
        self._call_slots = FairSemaphore(CALLS_MAX)
        self._connector_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by connector id
        self._pools: dict[tuple[bool, bool, float, float], _Pool] = {}

    async def act(
        self, connector: Connector, kind: str, parameters: Mapping[str, Any], *, project: str = ""
    ) -> RemoteReply:
        """Make the call of an action, explicit or derived, and read its reply.

        Args:
            kind: an action type, or an action's name.
            parameters: override the connector's own for this call.
            project: the caller's project.

        Raises: InvalidInput for a missing action, a placeholder without a value, or a URL that may not be called;
        TooComplex or RateLimited for templates that take too long; ModelFailed for a missing credential.
        """
        action = find_action(connector, kind)
        credentials = await self._credentials(connector)
        async with contextlib.AsyncExitStack() as stack:
            await self._acquire_slot(stack, connector, project)
            reply = await self._call_with_retries(
                connector, action, self._renderer(project, connector, action), parameters, credentials
            )
        return await self._postprocess(project, connector, action, reply, parameters)

    async def _acquire_slot(self, stack: contextlib.AsyncExitStack, connector: Connector, project: str) -> None:
        """Wait for a slot among the concurrent calls. Raises: RateLimited if none is free in time."""
        slots = self._connector_slots.setdefault(connector.id, asyncio.Semaphore(CONNECTOR_CALLS_MAX))
        wait_s = min((connector.client_config or ClientConfig()).connection_timeout, TIME_MAX_S)
        try:
            async with asyncio.timeout(wait_s):
                await stack.enter_async_context(slots)
                await stack.enter_async_context(self._call_slots.slot(project))
        except TimeoutError:
            raise RateLimited(
                f"Error communicating with remote model: Acquire operation took longer than {wait_s:g} s: "
                f"{CONNECTOR_CALLS_MAX} calls through {connector.id} are running, or {CALLS_MAX} in all",
                code="connection_pool_exhausted",
                retry_after_s=1.0,
            ) from None

    def _renderer(self, project: str, connector: Connector, action: Action) -> Render:
        """The function that renders an action's templates. Templates of callers are rendered in a child process."""
        if not connector.is_trusted:
            return partial(render_call, self._programs, project, connector, action)
        renderer = Renderer(connector, action)

        async def render(parameters: Mapping[str, Any], credentials: Mapping[str, str]) -> Rendered:
            return renderer.render(parameters, credentials)

        return render

    async def _credentials(self, connector: Connector) -> dict[str, str]:
        references = {key: text for key, text in connector.credential.items() if text.startswith("secret:")}
        revealed = await self._vault.reveal_all(text.removeprefix("secret:") for text in references.values())
        values = {key: revealed[text.removeprefix("secret:")] for key, text in references.items()}
        for key, text in connector.credential.items():
            if key not in references:
                if not connector.is_trusted:
                    raise ModelFailed(f"the credential {key} of {connector.name!r} is not a secret of this connector")
                values[key] = (await asyncio.to_thread(secrets.resolve, text, key=key)).reveal()
        return values

    async def _call_with_retries(
        self, connector: Connector, action: Action, render: Render, parameters: Mapping[str, Any],
        credentials: Mapping[str, str],
    ) -> RemoteReply:  # fmt: skip
        """Call with the retries of the connector's client_config, but never submit a batch twice."""
        config = connector.client_config or ClientConfig()
        deadline = self._clock.monotonic() + min(config.retry_timeout_seconds, RETRY_TIME_MAX_S)
        secret_values = [value for key, value in credentials.items() if key not in redaction.OPEN]
        calls = 0
        while True:
            rendered = await render(parameters, credentials)  # for each call, because a signature has a time
            if not connector.is_trusted:
                self._endpoints.check_url(rendered.url)
            reply = await self._call(connector, config, rendered, secret_values)
            calls += 1
            is_last = config.max_retry_times != -1 and calls > config.max_retry_times
            if reply.is_ok or is_last or not _may_repeat(action, reply):
                return reply
            wait_s = self._backoff_s(config, calls)
            if self._clock.monotonic() + wait_s > deadline:
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
        self, connector: Connector, config: ClientConfig, rendered: Rendered, secret_values: Sequence[str]
    ) -> RemoteReply:
        pool = await self._pool(connector.is_trusted, config)
        pool.calls += 1
        try:
            response, body = await pool.connections.exchange(
                rendered.method, rendered.url, rendered.body, headers=rendered.headers
            )
        except NoReply as failure:
            return _failure_reply(failure)
        finally:
            pool.calls -= 1
        if body is None:
            return RemoteReply(502, error="the reply of the remote service is too large", code="reply_too_large")
        body = redaction.without(
            body, secret_values
        )  # replies are stored and shown, and a service may repeat the secret
        is_throttled = THROTTLED in response.headers.get("x-amzn-errortype", "").lower()
        return _read_reply(response.status, body, is_throttled, has_retry_after="retry-after" in response.headers)

    async def _postprocess(
        self, project: str, connector: Connector, action: Action, reply: RemoteReply, parameters: Mapping[str, Any]
    ) -> RemoteReply:
        """Add the result of the action's post-processing to the reply."""
        if not reply.is_ok:
            return reply
        if not reply.body.strip():
            if action.action_type == "CANCEL_BATCH_PREDICT":
                return reply
            return msgspec.structs.replace(reply, status=502, error=EMPTY_REPLY, code="empty_reply")
        processing = Processing(connector, self._programs)
        try:
            result = await processing.output_json(action, reply.body, parameters, who=project)
        except (InvalidInput, RateLimited):  # not the reply that the action expects: the caller decides what that means
            return reply
        output = _decode(result)
        data = output[0].get("dataAsMap") if output else None
        return msgspec.structs.replace(reply, data=data if isinstance(data, dict) else None)

    async def _pool(self, is_trusted: bool, config: ClientConfig) -> _Pool:
        """The connection pool for a connector's settings, shared by connectors with the same settings."""
        read_s, connect_s = (
            float(max(1, min(seconds, TIME_MAX_S))) for seconds in (config.read_timeout, config.connection_timeout)
        )
        key = (is_trusted, not config.skip_ssl_verification, read_s, connect_s)
        pool = self._pools.pop(key, None)
        if pool is None:
            limits = Limits(connect_timeout_s=connect_s, attempt_timeout_s=read_s + connect_s)
            private = EVERYWHERE if is_trusted else self._private
            agent = {"User-Agent": f"batchmill/{batchmill.__version__}"}
            connections = require(CONNECTIONS, "a call of a connector")(
                limits, headers=agent, private=private, verify_tls=key[1], read_timeout_s=read_s
            )
            pool = _Pool(connections)
            await pool.connections.start()
        self._pools[key] = pool  # the most recently used is the last
        idle = [seconds for seconds, other in self._pools.items() if not other.calls and other is not pool]
        for seconds in idle[: max(0, len(self._pools) - POOLS_MAX)]:
            await self._pools.pop(seconds).connections.stop()
        return pool

    async def close(self) -> None:
        """Close every connection."""
        while self._pools:
            await self._pools.popitem()[1].connections.stop()


def _may_repeat(action: Action, reply: RemoteReply) -> bool:
    """Whether a retry is safe. A batch is submitted again only if the service certainly did not accept it."""
    if reply.status != 429 and reply.status < 500:
        return False
    return action.action_type != BATCH_PREDICT or not reply.may_have_acted


def _failure_reply(failure: NoReply) -> RemoteReply:
    """The result of a call without a reply. Raises: InvalidInput if the URL may not be called."""
    fault = failure.fault
    if fault.error.code in ("url_not_allowed", "invalid_url"):
        raise InvalidInput(redaction.mask(fault.error.message), code=fault.error.code)
    return RemoteReply(
        500,
        error=f"Error communicating with remote model: {_display_text(fault.error.message)}",
        code=fault.error.code,
        may_have_acted=fault.kind is not FaultKind.UNREACHABLE,
    )


def _read_reply(status: int, body: bytes, is_throttled: bool, *, has_retry_after: bool) -> RemoteReply:
    """Read a reply as ML Commons does, except that 300 counts as a redirect. Redirects are not followed.

    Args:
        has_retry_after: a 503 without `Retry-After` may come from a proxy whose service failed during the request.
    """
    if 200 <= status < 300 and not is_throttled:
        return RemoteReply(status, body)
    if 300 <= status < 400:
        error = f"Error from remote service: it answered {status}, and redirects are not followed"
        return RemoteReply(502, body, error=error, code="remote_error", may_have_acted=False)
    error = f"Error from remote service: {_display_text(body.decode(errors='replace'))}"
    if is_throttled:
        return RemoteReply(429, body, error=error, code="throttled", may_have_acted=False)
    is_refused = status == 503 and has_retry_after
    may_have_acted = status in UNCERTAIN or (status >= 500 and not is_refused)
    return RemoteReply(status, body, error=error, code="remote_error", may_have_acted=may_have_acted)


def _display_text(text: str) -> str:
    """Text of a service that may be shown: without secrets, and truncated."""
    text = redaction.mask(text)
    data = text.encode(errors="replace")
    return text if len(data) <= MESSAGE_BYTES_MAX else data[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"
