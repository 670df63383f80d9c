"""See that no lower bound in pyproject.toml allows a version with a known advisory: `python tools/check_advisories.py`.

The advisories are those of advisories.toml beside this file and, where the package index serves them, its own. An
index that cannot be reached, or that serves none, is said and is no failure.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TIMEOUT_S = 5.0
REPLY_BYTES_MAX = 32 * 1024 * 1024
BELOW = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*>=\s*([0-9]+(?:\.[0-9]+)*)")


def bounds(project: dict) -> dict[str, str]:
    """The lowest version of each dependency that pyproject.toml allows, those of the extras too."""
    listed = [*project["dependencies"], *sum(project.get("optional-dependencies", {}).values(), [])]
    found: dict[str, str] = {}
    for each in listed:
        match = BELOW.match(each)
        if match is None:
            raise SystemExit(f"pyproject.toml: {each!r} has no lower bound")
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        found[name] = min(found.get(name, match[2]), match[2], key=parts)
    return found


def parts(version: str) -> tuple[int, ...]:
    """A version in an order; what is not a number in it counts as 0, before its release."""
    numbers = [int(number) if number.isdigit() else 0 for number in version.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def listed_flaws(low: dict[str, str], advisories: list[dict]) -> list[str]:
    """What advisories.toml has against the bounds."""
    return [
        f"{each['package']}>={low[each['package']]}: {', '.join(each['ids'])}: {each['what']}; "
        f"raise the bound to {each['fixed']}, or say in tools/advisories.toml why it does no harm here"
        for each in advisories
        if "why_not" not in each and each["package"] in low and parts(low[each["package"]]) < parts(each["fixed"])
    ]


def index_url() -> str:
    """The index that pip asks: by its environment, its configuration, or what it has built in."""
    configured = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    built_in = [sys.executable, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"]
    found = os.environ.get("PIP_INDEX_URL", "")
    for command in (configured, built_in):
        found = found or subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not found:
        raise OSError("pip names no index")
    return found.rstrip("/")


def ask(index: str, name: str, version: str) -> list[dict]:
    """What an index has against one release. Raises: OSError, or ValueError for a reply that is not of the JSON API."""
    url = f"{index.removesuffix('/simple')}/pypi/{name}/{version}/json"
    if not url.startswith(("https://", "http://")):
        raise ValueError("its address is not of the web")
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
        document = json.loads(reply.read(REPLY_BYTES_MAX))
    if not isinstance(document, dict) or not isinstance(document.get("vulnerabilities"), list):
        raise ValueError("it serves no advisories")
    return document["vulnerabilities"]


def index_flaws(low: dict[str, str], advisories: list[dict], index: str) -> list[str]:
    """What the index has against the bounds, besides what advisories.toml explains. Raises: as `ask`."""
    explained = {name for each in advisories for name in each["ids"]}
    first, *others = low.items()
    replies = [(first, ask(index, *first))]  # who does not answer once is not asked for the others
    with ThreadPoolExecutor(8) as pool:
        replies += zip(others, pool.map(lambda each: ask_again(index, *each), others), strict=True)
    return [
        f"{name}>={version}: {each['id']}: {str(each.get('summary') or each.get('details', ''))[:100]}; "
        f"fixed in {', '.join(each.get('fixed_in') or ['no release'])}"
        for (name, version), found in replies
        for each in found
        if not each.get("withdrawn") and explained.isdisjoint({each["id"], *each.get("aliases", ())})
    ]


def ask_again(index: str, name: str, version: str) -> list[dict]:
    """As `ask`, of an index that has answered: a release that it does not have is none of its own."""
    try:
        return ask(index, name, version)
    except (OSError, ValueError) as error:
        print(f"    not checked at the index: {name} {version}: {error}")
        return []


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    low = bounds(tomllib.loads((root / "pyproject.toml").read_text())["project"])
    advisories = tomllib.loads((root / "tools" / "advisories.toml").read_text())["advisory"]
    flaws = listed_flaws(low, advisories)
    try:
        flaws += index_flaws(low, advisories, index_url())
    except (OSError, ValueError) as error:
        print(f"    not checked at the package index: {error}")
    for flaw in flaws:
        print(f"    {flaw}")
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main())
