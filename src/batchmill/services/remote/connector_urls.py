"""Where connectors of callers may lead, as far as their text tells. What a name resolves to is judged at every call."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from batchmill.errors import InvalidInput
from batchmill.models.addresses import Private, read_url
from batchmill.models.connectors.urls import own_url
from batchmill.types import Connector
from batchmill.wire.placeholders import split

PORTS = {"https": 443, "http": 80}


class Endpoints:
    """
    Args:
        trusted: expressions, one of which the whole URL of an action must match; none: the rules of addresses alone.
    """

    def __init__(self, private: Private, trusted: Iterable[str] = ()) -> None:
        self._private, self._trusted = private, [re.compile(each) for each in trusted]

    def check(self, connector: Connector) -> None:
        """Raises: InvalidInput for an action that leads where connectors of callers may not."""
        for action in connector.actions:
            self.check_url(own_url(action.url, connector.parameters))

    def check_url(self, url: str) -> None:
        """Check a URL with the connector's own parameters in it. What calls fill in stands behind its host: `reading`
        makes no connector of which that is not true.

        Raises: InvalidInput.
        """
        if self._trusted and not any(each.fullmatch(url) for each in self._trusted):
            raise InvalidInput(
                "Connector URL is not matching the trusted connector endpoint regex", code="url_not_trusted"
            )
        read_url("".join(piece if isinstance(piece, str) else "x" for piece in split(url)), self._private)


def new_places(old: Connector, new: Connector) -> list[str]:
    """Where a connector leads that did not before: as scheme, host and port, or without the check of certificates."""
    return sorted(_places(new) - _places(old))


def _places(connector: Connector) -> set[str]:
    config = connector.client_config
    how = " without verification" if config is not None and config.skip_ssl_verification else ""
    return {_place(own_url(action.url, connector.parameters)) + how for action in connector.actions}


def _place(url: str) -> str:
    """The part of a URL that no call can change: `reading` makes no connector whose host is open."""
    parts = urlsplit("".join(piece if isinstance(piece, str) else "x" for piece in split(url)))
    return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}:{parts.port or PORTS.get(parts.scheme.lower())}"
