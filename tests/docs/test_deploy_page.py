"""The page about deployments: its commands are ones, and its files are there. Nothing on it is run as a whole."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from batchmill.services.secrets import box

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Each command of the page, on one line."""
    text = "\n".join(BLOCKS).replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]


def test_every_block_is_shell():
    """The shell reads each block."""
    for block in BLOCKS:
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_every_file_is_there():
    """Each file of the repository that the page names exists."""
    named = set(re.findall(r"(?<![/\w])(deploy/[\w./-]*\w)", PAGE))
    made = {"deploy/compose/secrets", "deploy/compose/secrets/grafana_password", "deploy/compose/secrets/metrics.key"}
    made |= {"deploy/compose/secrets/secrets.key"}
    assert named and [each for each in named - made if not (ROOT / each).exists()] == []


def test_every_command_of_batchmill_is_one():
    """Each command of batchmill on the page exists with the options that it is given."""
    runners = r"/opt/batchmill/bin/batchmill|run --rm server"
    found = {match[1] for line in commands() if (match := re.search(rf"(?:{runners}) (.+)$", line))}
    assert len(found) == 4, found
    for command in found:
        words = shlex.split(command)
        names = [
            word for at, word in enumerate(words)
            if not word.startswith("-") and not (at and words[at - 1].startswith("--"))
        ]  # fmt: skip
        helped = subprocess.run(
            [sys.executable, "-m", "batchmill", *names, "--help"], capture_output=True, text=True, timeout=60
        )
        assert helped.returncode == 0, helped.stderr
        for option in [word for word in words if word.startswith("--")]:
            assert f"{option} " in helped.stdout, f"{command}: {option}"


def test_every_compose_command_names_a_service():
    """What the page builds, starts and stops are services of the compose file."""
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    services = set(re.findall(r"^  (\w+):", text.split("\nservices:\n")[1].split("\nnetworks:\n")[0], re.MULTILINE))
    words = (
        r"docker compose -f deploy/compose.yaml (?:--profile \w+ )?(build|run --rm|exec -T|up --detach|stop|start)(.*)"
    )
    found = [match for line in commands() if (match := re.match(words, line))]
    assert len(found) >= 8
    for match in found:
        named = [word for word in match[2].split() if not word.startswith("-")]
        first = named[:1] if match[1] in ("run --rm", "exec -T") else named
        assert set(first) <= services, match[0]


def test_the_page_makes_a_key_file(tmp_path: Path):
    """The commands that make a key file make one that batchmill reads."""
    made = re.findall(r"printf 'batchmill keys 1\\n%s\\n' \"\$\(openssl rand -hex 32\)\"", PAGE)
    assert len(made) == 2
    for at, command in enumerate(made):
        place = tmp_path / f"{at}.key"
        subprocess.run(["sh", "-ec", f"umask 077; {command} > {place}"], check=True, timeout=60)
        assert len(box.read(place).keys) == 1
