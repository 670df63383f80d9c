"""The systemd unit: systemd reads it, and its settings fit each other and the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from deploy.deploy_files import DEPLOY, PAGE

from batchmill.config import load

FOLDER = DEPLOY / "systemd"
UNIT = FOLDER / "batchmill.service"
EXPOSURE_MAX = 20  # of 100, by systemd's own measure


def settings(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit in a folder, with a program that is here, and drop-ins beside it."""
    place = tmp_path / UNIT.name
    place.write_text(UNIT.read_text().replace("/opt/batchmill/bin/batchmill", "/bin/true"))
    return place


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    assert shutil.which("systemd-analyze"), "there is no systemd-analyze: install the package systemd"
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("drop_in", ["", "gpu.conf", "bubblewrap.conf"])
def test_systemd_reads_the_unit(installed: Path, drop_in: str):
    """systemd finds nothing to object to in the unit, alone and with each drop-in."""
    if drop_in:
        folder = installed.with_name(f"{installed.name}.d")
        folder.mkdir()
        shutil.copy(FOLDER / drop_in, folder)
    done = analyze("verify", "--recursive-errors=no", "--man=no", str(installed))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_unit_is_told(installed: Path):
    """The check is one: a setting that systemd does not know is told."""
    installed.write_text(installed.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    assert "mixd" in analyze("verify", "--recursive-errors=no", "--man=no", str(installed)).stderr


def test_the_unit_is_hardened(installed: Path):
    """systemd's own review of what the service may still do stays below its limit."""
    done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", str(installed))
    assert done.returncode == 0, done.stdout


def test_the_unit_fits_the_page(tmp_path: Path):
    """The key file is a credential of the unit, data is where it may write, and the page's configuration is read."""
    unit = settings(UNIT)
    environ = dict(each.split("=", 1) for each in unit["Environment"])
    assert unit["LoadCredential"] == ["secrets.key:/etc/batchmill/secrets.key"]
    assert environ["BATCHMILL_SECRETS_KEY_FILE"] == "%d/secrets.key"
    assert environ["BATCHMILL_DATA_DIR"] == f"/var/lib/{unit['StateDirectory'][0]}"
    assert environ["HOME"] == f"/var/cache/{unit['CacheDirectory'][0]}"
    assert unit["NoNewPrivileges"] == ["yes"] and unit["ProtectSystem"] == ["strict"] and unit["User"] == ["batchmill"]
    assert (unit["StartLimitIntervalSec"], unit["StartLimitBurst"]) == (["300"], ["5"])
    assert "Five failures in five minutes" in PAGE
    assert unit["Restart"] == ["on-failure"] and unit["Type"] == ["exec"] and unit["KillMode"] == ["mixed"]
    shown = PAGE.split("<!-- systemd configuration -->")[1].split("```toml\n")[1].split("```")[0]
    (tmp_path / "batchmill.toml").write_text(shown)
    assert load(environ={"HOME": str(tmp_path)}, cwd=tmp_path).server.port == 8000


def test_drop_ins_change_what_the_unit_sets():
    """Each setting of a drop-in is one of the unit's, or belongs to the devices that it opens."""
    unit = settings(UNIT)
    for name in ("gpu.conf", "bubblewrap.conf"):
        assert set(settings(FOLDER / name)) - {"DevicePolicy", "DeviceAllow"} <= set(unit)
