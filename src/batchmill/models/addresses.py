"""Rules against server-side request forgery: which URLs, hosts and addresses of callers are refused, and why.

The rules are pure and know nothing of sockets. `guarded_http` applies them to every connection.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from msgspec import Struct

from batchmill.errors import InvalidConfig, InvalidInput
from batchmill.wire.input_urls import WEB_URL_CHARS_MAX, shown

URL_CHARS_MAX = WEB_URL_CHARS_MAX
PORT_MAX = 65_535
PORTS_BELOW_1024 = frozenset({80, 443})  # the others belong to services other than web servers
LISTED_MAX = 256
SHOWN_CHARS = 100

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


# Mostly metadata services of clouds, which return credentials. Refused even if private addresses are allowed.
ALWAYS_REFUSED = _networks(
    "169.254.0.0/16",  # link-local; AWS, Azure, GCP, ECS and EKS
    "fe80::/10",
    "fd00:ec2::/32",  # AWS over IPv6
    "fd20:ce::254/128",  # GCP over IPv6
    "fd00:42::42/128",  # Scaleway over IPv6
    "fd00:c1::a9fe:a9fe/128",  # Oracle over IPv6
    "100.100.100.200/32",  # Alibaba
    "192.0.0.192/32",  # Oracle
    "168.63.129.16/32",  # Azure; a public address
    "0.0.0.0/8",
    "::/128",
    "224.0.0.0/4",
    "ff00::/8",
    "240.0.0.0/4",
)
# IANA's registries of special-purpose addresses. Python's own tables differ between versions.
_SPECIAL_V4 = _networks(
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
# The public internet of IPv6 is global unicast except for its special-purpose blocks.
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_SPECIAL_V6 = _networks("2001::/23", "2001:db8::/32", "3fff::/20")
# These blocks have an IPv4 address in the last 32 bits, and packets may be sent to it. An address of the first two is
# public if its IPv4 address is, because translators in the network or the kernel send packets there.
_PUBLIC_EMBEDDINGS = _networks("64:ff9b::/96", "::ffff:0:0/96")
_EMBEDDINGS = (*_PUBLIC_EMBEDDINGS, *_networks("64:ff9b:1::/48", "::ffff:0:0:0/96", "::/96"))
_MAPPED = ipaddress.ip_network("::ffff:0:0/96")
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")  # its IPv4 address follows these bits (RFC 3056)
_TEREDO = ipaddress.ip_network("2001::/32")  # the server's IPv4 address, then the client's, inverted (RFC 4380)
_LOCAL = _networks("127.0.0.0/8", "::1/128")
_UNSPECIFIED = _networks("0.0.0.0/32", "::/128")  # a socket bound there listens at every address of the machine
_ISATAP = 0x0000_5EFE  # the third quarter of an address whose last quarter is an IPv4 address (RFC 5214)
_UNIVERSAL = 0x0200_0000  # a bit of the third quarter that may be set

_LABEL = r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>/[!\x22$-~]*)?(?P<query>\?[!\x22$-~]*)?",
    re.IGNORECASE,
)
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<host>[^:\[\]@]+))(?::(?P<port>[0-9]{1,6}))?", re.IGNORECASE)


class Target(Struct, frozen=True):
    """A parsed URL whose text breaks no rule."""

    url: str
    host: str  # in lower case; an IPv6 address without its brackets
    port: int
    is_listed: bool  # the operator listed this host: it may be private and use plain http


class Private(Struct, frozen=True):
    """Host names and networks that the operator allows although they are private."""

    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    is_everywhere: bool = False  # the operator chose the URL: only ALWAYS_REFUSED applies

    def holds(self, address: Address) -> bool:
        return self.is_everywhere or any(address in network for network in self.networks)


EVERYWHERE = Private(is_everywhere=True)


def read_private(entries: Iterable[str]) -> Private:
    """The list `server.private_hosts`: names, addresses and networks (10.0.0.0/8). Raises: InvalidConfig."""
    names: set[str] = set()
    networks: list[Network] = []
    for entry in entries:
        try:
            networks.append(ipaddress.ip_network(entry))
        except ValueError:
            name = entry.lower()
            if _looks_numeric(name) or not _NAME.fullmatch(name):
                raise InvalidConfig(
                    f"server.private_hosts: {entry[:SHOWN_CHARS]!r} is not a host name, address or network (10.0.0.0/8)"
                ) from None
            names.add(name)
    if len(names) + len(networks) > LISTED_MAX:
        raise InvalidConfig(f"server.private_hosts has more than {LISTED_MAX} entries; write networks instead")
    return Private(frozenset(names), tuple(networks))


def read_url(url: str, private: Private = Private()) -> Target:
    """Parse and check a URL of a caller.

    Raises: InvalidInput, code `url_not_allowed`, with the reason.
    """
    if len(url) > URL_CHARS_MAX:
        raise _refusal(url, f"it is longer than {URL_CHARS_MAX} characters")
    match = _URL.fullmatch(url)
    if match is None or "\\" in url:
        raise _refusal(
            url, "it is not a URL of plain characters; write host names in their xn-- form, and others as %41"
        )
    scheme = match["scheme"].lower()
    if scheme not in ("https", "http"):
        raise _refusal(url, "it does not begin with https:// or http://")
    if "@" in match["authority"]:
        raise _refusal(url, "it has a user name or a password")
    host, port = _read_authority(url, match["authority"], 443 if scheme == "https" else 80)
    address = _address_of(host)
    is_listed = host in private.names or (address is not None and private.holds(address))
    if address is not None and (flaw := find_address_flaw(address, is_listed)):
        raise _refusal(url, flaw)
    if scheme == "http" and not is_listed:
        raise _refusal(url, "it is not https; plain http is allowed only for hosts in server.private_hosts")
    return Target(url, host, port, is_listed)


def _read_authority(url: str, authority: str, default_port: int) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise _refusal(url, "it has no valid host")
    port = int(match["port"]) if match["port"] else default_port
    if not 1 <= port <= PORT_MAX or (port < 1024 and port not in PORTS_BELOW_1024):
        raise _refusal(url, f"the port {port} is not allowed (80, 443, 1024 to {PORT_MAX})")
    if match["v6"]:
        try:
            return str(ipaddress.IPv6Address(match["v6"])), port
        except ValueError:
            raise _refusal(url, "its IPv6 address is invalid") from None
    host = match["host"].lower()
    if host.endswith("."):
        raise _refusal(url, "its host ends with a dot; write it without")
    if _looks_numeric(host):
        if _address_of(host) is None:
            raise _refusal(url, "its host is a number; an IPv4 address has four decimal parts (192.0.2.1)")
    elif len(host) > 253 or not _NAME.fullmatch(host):
        raise _refusal(url, "its host is not a name of letters, digits, - and dots; write others in their xn-- form")
    return host, port


def _looks_numeric(host: str) -> bool:
    """Whether a resolver would read a host as an address in any notation: 127.1, 0x7f.1, 2130706433."""
    last = host.rsplit(".", 1)[-1]
    return last.isdigit() or bool(re.fullmatch(r"0x[0-9a-f]*", last))


def _address_of(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def find_address_flaw(address: Address, is_open: bool = False) -> str:
    """The reason to refuse an address; empty if it is allowed. `is_open`: a private address is allowed."""
    addresses = (address, *_embedded_ipv4(address))
    if any(item in network for item in addresses for network in ALWAYS_REFUSED):
        return "its address is reserved, or is one where clouds serve credentials"
    if not is_open and not all(map(_is_public, addresses)):
        return "its address is private; an operator can allow it with server.private_hosts"
    return ""


def refusal_for(address: Address, target: Target, private: Private) -> str:
    """The reason to refuse an address that the name of `target` resolved to; empty if it is allowed."""
    return find_address_flaw(address, target.is_listed or private.holds(address))


def _embedded_ipv4(address: Address) -> list[Address]:
    """The IPv4 addresses inside an IPv6 address."""
    if address.version == 4:
        return []
    bits, values = int(address), []
    if address in _SIX_TO_FOUR:
        values.append(bits >> 80)
    if address in _TEREDO:
        values += [bits >> 64, ~bits]
    third_quarter = bits >> 32 & 0xFFFF_FFFF
    if bits > 1 and (third_quarter & ~_UNIVERSAL == _ISATAP or any(address in network for network in _EMBEDDINGS)):
        values.append(bits)
    return [ipaddress.IPv4Address(each & 0xFFFF_FFFF) for each in values]


def unmapped(address: Address) -> Address:
    """Convert an IPv4-mapped IPv6 address (::ffff:192.0.2.1) to the IPv4 address; return others unchanged."""
    return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in _MAPPED else address


def is_local(address: Address) -> bool:
    """Whether an address is loopback."""
    return any(unmapped(address) in network for network in _LOCAL)


def is_wildcard_address(address: Address) -> bool:
    """Whether an address is unspecified (0.0.0.0, ::): a socket bound to it listens at every address."""
    return any(unmapped(address) in network for network in _UNSPECIFIED)


def _is_public(address: Address) -> bool:
    """Whether an address is public, without regard to the IPv4 addresses inside it."""
    if address.version == 4:
        return not any(address in network for network in _SPECIAL_V4)
    if address in _GLOBAL_V6:
        return not any(address in network for network in _SPECIAL_V6)
    return any(address in network for network in _PUBLIC_EMBEDDINGS)


def _refusal(url: str, why: str) -> InvalidInput:
    return InvalidInput(f"the URL {shown(url)[:SHOWN_CHARS]!r} is not allowed: {why}", code="url_not_allowed")
