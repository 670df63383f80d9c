"""Where batchmill may be sent by what a caller wrote: which URLs, hosts and addresses are refused, and why.

Pure rules. They know nothing of sockets: `guarded_http` holds every connection to them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from msgspec import Struct

from batchmill.errors import InvalidConfig, InvalidInput

URL_CHARS_MAX = 2048
PORT_MAX = 65_535
PORTS_BELOW_1024 = frozenset({80, 443})  # the others belong to services that are no web servers
LISTED_MAX = 256
SHOWN_CHARS = 100

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


# Where clouds hand out credentials to whoever asks: closed even where private addresses are allowed.
NEVER = _networks(
    "169.254.0.0/16",  # link-local; AWS, Azure, GCP, ECS and EKS
    "fe80::/10",
    "fd00:ec2::/32",  # AWS over IPv6
    "fd20:ce::254/128",  # GCP over IPv6
    "fd00:42::42/128",  # Scaleway over IPv6
    "fd00:c1::a9fe:a9fe/128",  # Oracle over IPv6
    "100.100.100.200/32",  # Alibaba
    "192.0.0.192/32",  # Oracle
    "168.63.129.16/32",  # Azure, though it looks public
    "0.0.0.0/8",
    "::/128",
    "224.0.0.0/4",
    "ff00::/8",
    "240.0.0.0/4",
)
# IANA's registries of special-purpose addresses, written out: Python's own tables differ from version to version.
_SPECIAL_V4 = _networks(
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
# Of IPv6 the public internet is global unicast without what is special in it; everything else is not.
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_SPECIAL_V6 = _networks("2001::/23", "2001:db8::/32", "3fff::/20")
# Inside of these an IPv4 address is written in the last 32 bits: the packet may end there. The first two are public
# where that address is: translators of the network, and of the kernel, take packets to it.
_PUBLIC_CARRIERS = _networks("64:ff9b::/96", "::ffff:0:0/96")
_CARRIERS = (*_PUBLIC_CARRIERS, *_networks("64:ff9b:1::/48", "::ffff:0:0:0/96", "::/96"))
_MAPPED = ipaddress.ip_network("::ffff:0:0/96")
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")  # its IPv4 address stands behind these bits (RFC 3056)
_TEREDO = ipaddress.ip_network("2001::/32")  # the server's stands there, and the client's, inverted, last (RFC 4380)
_LOCAL = _networks("127.0.0.0/8", "::1/128")
_EVERY = _networks("0.0.0.0/32", "::/128")  # to listen there is to listen at every address of the machine
_ISATAP = 0x0000_5EFE  # the third quarter of an address whose last is an IPv4 one (RFC 5214)
_UNIVERSAL = 0x0200_0000  # a bit of that quarter which may be set

_LABEL = r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>/[!\x22$-~]*)?(?P<query>\?[!\x22$-~]*)?",
    re.IGNORECASE,
)
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<host>[^:\[\]@]+))(?::(?P<port>[0-9]{1,6}))?", re.IGNORECASE)


class Target(Struct, frozen=True):
    """A URL that was read, and may be called as far as its text can tell."""

    url: str
    host: str  # in lower case; an IPv6 address without its brackets
    port: int
    is_listed: bool  # the operator named this very host: it may be private, and spoken to without TLS


class Private(Struct, frozen=True):
    """What an operator opened: hosts by name, and networks. Naming one opens no other."""

    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    is_everywhere: bool = False  # whoever runs the machine chose where calls go: only NEVER stays closed

    def holds(self, address: Address) -> bool:
        return self.is_everywhere or any(address in network for network in self.networks)


EVERYWHERE = Private(is_everywhere=True)


def read_private(listed: Iterable[str]) -> Private:
    """The list `server.private_hosts`: names, addresses and networks (10.0.0.0/8). Raises: InvalidConfig."""
    names: set[str] = set()
    networks: list[Network] = []
    for each in listed:
        try:
            networks.append(ipaddress.ip_network(each))
        except ValueError:
            name = each.lower()
            if _looks_numeric(name) or not _NAME.fullmatch(name):
                raise InvalidConfig(
                    f"server.private_hosts: {each[:SHOWN_CHARS]!r} is no host name, address or network (10.0.0.0/8)"
                ) from None
            names.add(name)
    if len(names) + len(networks) > LISTED_MAX:
        raise InvalidConfig(f"server.private_hosts has more than {LISTED_MAX} entries; write networks instead")
    return Private(frozenset(names), tuple(networks))


def read_url(url: str, private: Private = Private()) -> Target:
    """Read a URL that somebody else wrote.

    Raises: InvalidInput, code `url_not_allowed`, with the reason.
    """
    if len(url) > URL_CHARS_MAX:
        raise _refused(url, f"it is longer than {URL_CHARS_MAX} characters")
    found = _URL.fullmatch(url)
    if found is None or "\\" in url:
        raise _refused(url, "it is no address of plain characters; write names in their xn-- form, and others as %41")
    scheme = found["scheme"].lower()
    if scheme not in ("https", "http"):
        raise _refused(url, "it begins neither with https:// nor with http://")
    if "@" in found["authority"]:
        raise _refused(url, "it holds a user name or a password")
    host, port = _read_authority(url, found["authority"], 443 if scheme == "https" else 80)
    address = _address_of(host)
    is_listed = host in private.names or (address is not None and private.holds(address))
    if address is not None and (flaw := flaw_of(address, is_listed)):
        raise _refused(url, flaw)
    if scheme == "http" and not is_listed:
        raise _refused(url, "it is not https; plain http goes only to hosts that server.private_hosts names")
    return Target(url, host, port, is_listed)


def _read_authority(url: str, authority: str, default_port: int) -> tuple[str, int]:
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise _refused(url, "it names no host, or none that can be read")
    port = int(found["port"]) if found["port"] else default_port
    if not 1 <= port <= PORT_MAX or (port < 1024 and port not in PORTS_BELOW_1024):
        raise _refused(url, f"the port {port} is not one of a web server (80, 443, 1024 to {PORT_MAX})")
    if found["v6"]:
        try:
            return str(ipaddress.IPv6Address(found["v6"])), port
        except ValueError:
            raise _refused(url, "its IPv6 address cannot be read") from None
    host = found["host"].lower()
    if host.endswith("."):
        raise _refused(url, "its host ends with a dot; write it without")
    if _looks_numeric(host):
        if _address_of(host) is None:
            raise _refused(url, "its host is a number; an IPv4 address has four decimal parts (192.0.2.1)")
    elif len(host) > 253 or not _NAME.fullmatch(host):
        raise _refused(url, "its host is no name of letters, digits, - and dots; write others in their xn-- form")
    return host, port


def _looks_numeric(host: str) -> bool:
    """A resolver would read it as an address, in whatever notation: 127.1, 0x7f.1, 2130706433."""
    last = host.rsplit(".", 1)[-1]
    return last.isdigit() or bool(re.fullmatch(r"0x[0-9a-f]*", last))


def _address_of(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def flaw_of(address: Address, is_open: bool = False) -> str:
    """Why nobody may be sent to an address; empty: they may. `is_open`: it may be a private one."""
    places = (address, *_inner(address))
    if any(each in network for each in places for network in NEVER):
        return "its address is one where no server of others can be, or where a cloud keeps credentials"
    if not is_open and not all(map(_is_public, places)):
        return "its address is private; an operator can open it with server.private_hosts"
    return ""


def may_reach(address: Address, target: Target, private: Private) -> str:
    """Why `target` may not be called at an address that its name resolved to; empty: it may."""
    return flaw_of(address, target.is_listed or private.holds(address))


def _inner(address: Address) -> list[Address]:
    """The IPv4 addresses that an IPv6 address carries inside."""
    if address.version == 4:
        return []
    bits, found = int(address), []
    if address in _SIX_TO_FOUR:
        found.append(bits >> 80)
    if address in _TEREDO:
        found += [bits >> 64, ~bits]
    above = bits >> 32 & 0xFFFF_FFFF
    if bits > 1 and (above & ~_UNIVERSAL == _ISATAP or any(address in network for network in _CARRIERS)):
        found.append(bits)
    return [ipaddress.IPv4Address(each & 0xFFFF_FFFF) for each in found]


def unmapped(address: Address) -> Address:
    """An IPv4 address that is written as IPv6 (::ffff:192.0.2.1) as the IPv4 address."""
    return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in _MAPPED else address


def is_local(address: Address) -> bool:
    """Whether only this machine reaches it."""
    return any(unmapped(address) in network for network in _LOCAL)


def is_every(address: Address) -> bool:
    """Whether it stands for every address of the machine."""
    return any(unmapped(address) in network for network in _EVERY)


def _is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, as far as it says itself: not what is written inside it."""
    if address.version == 4:
        return not any(address in network for network in _SPECIAL_V4)
    if address in _GLOBAL_V6:
        return not any(address in network for network in _SPECIAL_V6)
    return any(address in network for network in _PUBLIC_CARRIERS)


def _refused(url: str, why: str) -> InvalidInput:
    return InvalidInput(f"the URL {url[:SHOWN_CHARS]!r} is not allowed: {why}", code="url_not_allowed")
