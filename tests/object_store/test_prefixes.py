"""Which objects a project may name: what a configuration may give, and what callers may ask for."""

import pytest

from batchmill.errors import Forbidden, InvalidConfig, InvalidInput
from batchmill.object_store.prefixes import check_allowed, check_prefixes

OWN = ["s3://data/team-a/"]


@pytest.mark.parametrize(
    ("prefix", "storage"),
    [
        ("s3://data/", None),
        ("gs://data/a/b/", "s3://data/a"),
        ("s3://data/team-a/", "s3://data/team-ab"),
        ("s3://data/team-a/", "s3://data2"),
        ("az://data/Team A/", None),
    ],
)
def test_a_folder_may_be_given(prefix, storage):
    check_prefixes("projects.a.objects", [prefix], storage)


@pytest.mark.parametrize(
    ("prefix", "storage", "expected"),
    [
        ("s3://data/team-a", None, "must end with a slash"),
        ("s3://data", None, "must end with a slash"),
        ("file:///data/", None, "must begin with one of s3://"),
        ("S3://data/", None, "must begin with one of s3://"),
        ("https://data/", None, "must begin with one of s3://"),
        ("s3://Data/", None, "the bucket of"),
        ("s3://data/*/", None, "names one folder"),
        ("s3://data/%2e%2e/", None, "names one folder"),
        ("s3://data/mill/", "s3://data/mill", "overlap"),
        ("s3://data/mill/x/", "s3://data/mill/", "overlap"),
        ("s3://data/", "s3://data/mill", "overlap"),
        ("s3://data/MILL/", "s3://data/mill", "overlap"),
        ("s3://data/mill/x/", "s3://data", "overlap"),
    ],
)
def test_what_is_no_folder_or_not_theirs_is_refused(prefix, storage, expected):
    with pytest.raises(InvalidConfig, match=expected):
        check_prefixes("projects.a.objects", [prefix], storage)


@pytest.mark.parametrize("prefix", ["s3://data/a/../b/", "s3:///a/", "s3://key@data/", "s3://data//"])
def test_what_is_no_url_is_refused(prefix):
    with pytest.raises(InvalidConfig, match="projects.a.objects: .* is not a URL of an object"):
        check_prefixes("projects.a.objects", [prefix], None)


@pytest.mark.parametrize("url", ["s3://data/team-a/x.jsonl", "s3://data/team-a/", "s3://data/team-a/**/*.csv"])
def test_what_is_below_is_allowed(url):
    check_allowed(url, OWN, "a")


@pytest.mark.parametrize(
    "url",
    [
        "s3://data/team-ab/x", "s3://data/team-a", "s3://data/team-b/x", "s3://data/TEAM-A/x", "s3://other/team-a/x",
        "s3://data/*/x", "s3://data/team-[a]/x", "gs://data/team-a/x", "s3://data/mill/jobs/x", "s3://data/",
    ],
)  # fmt: skip
def test_what_is_not_below_is_refused(url):
    with pytest.raises(Forbidden, match="Upload and download") as refused:
        check_allowed(url, OWN, "a")
    assert refused.value.code == "object_forbidden"


@pytest.mark.parametrize(
    "url",
    [
        "s3://data/team-a/../team-b/x", "s3://data/team-a/%2e%2e/team-b/x", "s3://data/team-a/%252E./x",
        "s3://data/team-a/..%2fteam-b/x", "s3://data/team-a/..\\team-b/x", "s3://data/team-a//x",
        "s3://data/team-a/\nx",
    ],
)  # fmt: skip
def test_ways_out_of_a_folder_are_refused(url):
    with pytest.raises(InvalidInput, match="not a URL of an object") as refused:
        check_allowed(url, OWN, "a")
    assert refused.value.code == "invalid_url"
