"""Which client a request comes from, and how, also behind proxies that whoever runs the server trusts."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from batchmill.errors import InvalidConfig
from batchmill.models.addresses import unmapped

PROXIES_MAX = 256  # entries of server.trusted_proxies
FORWARDED_MAX = 64  # addresses of X-Forwarded-For that are looked at, from the right
SCHEMES = {b"http": "http", b"https": "https"}
IPV6_PREFIX = 64  # whoever has one address of such a network has them all

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Proxies:
    """`entries` are addresses and networks ("10.0.0.0/8"). Raises: InvalidConfig."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        if len(entries) > PROXIES_MAX:
            raise InvalidConfig(f"server.trusted_proxies has {len(entries)} entries; {PROXIES_MAX} at most")
        self._networks = [_network(entry) for entry in entries]

    def trusts(self, peer: str) -> bool:
        """The peer of a connection is a proxy whose X-Forwarded-For and X-Forwarded-Proto are believed."""
        if not self._networks:
            return False
        address = _address(peer)
        return address is not None and self._is_proxy(address)

    def client(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Who is counted for a request: the peer or, behind trusted proxies, the address that they tell.

        That is the rightmost of X-Forwarded-For that is no trusted proxy: what stands left of it anybody may have
        written. Of IPv6 it is the whole /64.
        """
        if not self.trusts(peer):
            return group_of(peer)
        told = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
        for each in reversed(told.split(",")[-FORWARDED_MAX:]):
            address = _address(each.strip())
            if address is None:
                break
            if not self._is_proxy(address):
                return _group(address)
        return group_of(peer)

    def scheme(self, peer: str, headers: Sequence[tuple[bytes, bytes]], own: str) -> str:
        """What the client's own connection speaks: `own`, or what a trusted proxy tells of its own in
        X-Forwarded-Proto."""
        if not self.trusts(peer):
            return own
        told = next((value for name, value in headers if name == b"x-forwarded-proto"), b"")
        return SCHEMES.get(told.strip().lower(), own)

    def _is_proxy(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


def group_of(peer: str) -> str:
    """What an address is counted as; a text that is none is counted as it is."""
    if ":" not in peer:
        return peer
    address = _address(peer)
    return peer if address is None else _group(address)


def _group(address: Address) -> str:
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


def _address(text: str) -> Address | None:
    """An IPv4 address that is written as IPv6 is the IPv4 address; a zone is left out."""
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return unmapped(address)


def _network(entry: str) -> Network:
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        raise InvalidConfig(f"server.trusted_proxies: {entry[:80]!r} is no address and no network: {error}") from None
