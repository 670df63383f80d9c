"""Which URLs of others are called, and which addresses behind their names."""

import ipaddress

import pytest

from batchmill.errors import InvalidConfig, InvalidInput
from batchmill.models.addresses import URL_CHARS_MAX, find_address_flaw, read_private, read_url, refusal_for

REFUSED = {
    "http://127.1/": "is a number",
    "https://127.1/": "is a number",
    "https://0x7f.1/": "is a number",
    "https://0x7f000001/": "is a number",
    "https://2130706433/": "is a number",
    "https://0177.0.0.1/": "is a number",
    "https://127.0.0.1/": "private",
    "https://10.1.2.3/": "private",
    "https://192.168.0.1/": "private",
    "https://100.64.0.1/": "private",
    "https://0.0.0.0/": "reserved",
    "https://[::]/": "reserved",
    "https://[::1]/": "private",
    "https://[::ffff:127.0.0.1]/": "private",
    "https://[::ffff:7f00:1]/": "private",
    "https://[64:ff9b::7f00:1]/": "private",
    "https://[64:ff9b:1::a00:1]/": "private",
    "https://[2002:7f00:1::]/": "private",
    "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/": "private",
    "https://[::127.0.0.1]/": "private",
    "https://[::ffff:0:127.0.0.1]/": "private",
    "https://[::ffff:0:8.8.8.8]/": "private",
    "https://[::ffff:0:169.254.169.254]/": "credentials",
    "https://[::8.8.8.8]/": "private",
    "https://[2606:4700::5efe:10.0.0.1]/": "private",
    "https://[2606:4700::200:5efe:127.0.0.1]/": "private",
    "https://[2606:4700::5efe:169.254.169.254]/": "credentials",
    "https://[2002:a9fe:a9fe::1]/": "credentials",
    "https://[2002:a00:1::8.8.8.8]/": "private",
    "https://[2001:0:a9fe:a9fe:8000:63bf:f7f7:f7f7]/": "credentials",
    "https://[2001::ffff:ffff:5601:5601]/": "credentials",
    "https://[64:ff9b::169.254.169.254]/": "credentials",
    "https://[2001:db8::1]/": "private",
    "https://[2001:2::1]/": "private",
    "https://[2001:20::1]/": "private",
    "https://[3fff::1]/": "private",
    "https://[5f00::1]/": "private",
    "https://[100::1]/": "private",
    "https://[4000::1]/": "private",
    "https://198.18.0.1/": "private",
    "https://192.0.0.8/": "private",
    "https://192.0.2.1/": "private",
    "https://192.88.99.1/": "private",
    "https://203.0.113.9/": "private",
    "https://172.31.255.255/": "private",
    "https://[fd00:42::42]/": "credentials",
    "https://[fc00::1]/": "private",
    "https://[fec0::1]/": "private",
    "https://[fd00:ec2::254]/": "credentials",
    "https://[fd20:ce::254]/": "credentials",
    "https://169.254.169.254/latest/meta-data/": "credentials",
    "https://[::ffff:169.254.169.254]/": "credentials",
    "https://[fe80::a9fe:a9fe]/": "credentials",
    "https://100.100.100.200/": "credentials",
    "https://168.63.129.16/": "credentials",
    "https://224.0.0.1/": "reserved",
    "https://[ff02::1]/": "reserved",
    "https://255.255.255.255/": "reserved",
    "https://user:pw@example.com/": "user name",
    "https://allowed.com@evil.example/": "user name",
    "gopher://example.com/": "does not begin with",
    "ftp://example.com/": "does not begin with",
    "file:///etc/passwd": "does not begin with",
    "javascript:alert(1)": "not a URL",
    "//example.com/": "not a URL",
    "https:///x": "no valid host",
    "https://example.com:22/": "port 22",
    "https://example.com:0/": "port 0",
    "https://example.com:65536/": "port 65536",
    "https://example.com:99999999/": "no valid host",
    "https://example.com:/": "no valid host",
    "https://example.com./": "ends with a dot",
    "https://localhost./": "ends with a dot",
    "https://exаmple.com/": "not a name",  # a Cyrillic letter
    "https://example。com/": "not a name",
    "https://example.com\\@evil.example/": "not a URL",
    "https://example.com/a b": "not a URL",
    "https://example.com/\r\nX: y": "not a URL",
    "https://example.com/#part": "not a URL",
    "https://-x.example/": "not a name",
    "https://a..b/": "not a name",
    "https://[::1/": "no valid host",
    "https://[fe80::1%25eth0]/": "no valid host",
    "https://%31%32%37.0.0.1/": "is a number",
    "http://example.com/": "not https",
    "": "not a URL",
    "https://" + "a" * URL_CHARS_MAX: "longer than",
}


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_of_somebody_else_is_refused_with_the_reason(url: str):
    """Every way to write a private address, a metadata service or another protocol is refused by name."""
    with pytest.raises(InvalidInput) as refused:
        read_url(url)
    assert refused.value.code == "url_not_allowed"
    assert REFUSED[url] in refused.value.message


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://example.com/hook", "example.com", 443),
        ("HTTPS://Example.COM:8443/a/b?c=d", "example.com", 8443),
        ("https://xn--exmple-4nf.com", "xn--exmple-4nf.com", 443),
        ("https://8.8.8.8/", "8.8.8.8", 443),
        ("https://[2606:4700::1111]:443/", "2606:4700::1111", 443),
        ("https://allowed.com.evil.example/", "allowed.com.evil.example", 443),
        ("https://localhost/", "localhost", 443),  # refused once it is resolved
    ],
)
def test_a_public_url_is_read(url: str, host: str, port: int):
    """What may be called is read to its host and port, and opens nothing."""
    target = read_url(url)
    assert (target.host, target.port, target.is_listed) == (host, port, False)


def test_a_listed_host_may_be_private_and_plain():
    """A host, an address or a network that the operator names may be private and spoken to without TLS."""
    private = read_private(["hooks.lan", "127.0.0.1", "10.2.0.0/16", "fd12::/16"])
    for url in ("http://hooks.lan:9000/", "http://127.0.0.1:8080/x", "https://10.2.3.4/", "http://[fd12::1]/"):
        assert read_url(url, private).is_listed


@pytest.mark.parametrize("url", ["http://10.3.0.1/", "https://127.0.0.2/", "http://hooks.lan.evil.example/"])
def test_naming_one_host_opens_no_other(url: str):
    """An address beside the listed ones stays closed, and so does a name that only begins alike."""
    with pytest.raises(InvalidInput):
        read_url(url, read_private(["hooks.lan", "127.0.0.1", "10.2.0.0/16"]))


@pytest.mark.parametrize("url", ["http://169.254.169.254/", "http://[fd00:ec2::254]/", "http://[::ffff:a9fe:a9fe]/"])
def test_metadata_stays_closed_whatever_is_listed(url: str):
    """Where clouds keep credentials nobody is sent, though everything is listed."""
    with pytest.raises(InvalidInput, match="credentials"):
        read_url(url, read_private(["0.0.0.0/0", "::/0"]))


def test_a_name_is_judged_by_what_it_resolves_to():
    """A public name with a private address is refused, a listed one is not, and neither reaches metadata."""
    private = read_private(["hooks.lan", "10.2.0.0/16"])
    public, listed = read_url("https://example.com/", private), read_url("http://hooks.lan/", private)
    inside = ipaddress.ip_address("192.168.1.1")
    assert "private" in refusal_for(inside, public, private)
    assert refusal_for(inside, listed, private) == ""
    assert refusal_for(ipaddress.ip_address("10.2.0.9"), public, private) == ""
    assert "credentials" in refusal_for(ipaddress.ip_address("169.254.169.254"), listed, private)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2606:4700::5efe:8.8.8.8", "172.32.0.1"],
)
def test_a_public_address_is_public_in_every_notation(address: str):
    """An IPv6 address that carries a public IPv4 address is judged by it."""
    assert find_address_flaw(ipaddress.ip_address(address)) == ""


@pytest.mark.parametrize("entry", ["", "a b", "127.1", "10.0.0.1/8", "https://x", "*.lan"])
def test_a_list_that_cannot_be_read_is_refused(entry: str):
    """An entry that is not a name, address or network is an error that shows it."""
    with pytest.raises(InvalidConfig, match=r"server\.private_hosts"):
        read_private([entry])
