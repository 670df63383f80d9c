"""The images: their build steps run in clean folders, and what they promise of process 1, users and health."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from deploy.deploy_files import DEPLOY, PORT, ROOT, USER

CONTAINERFILE = DEPLOY / "Containerfile"
COMING = {"ray"}  # an extra that this build may not have yet; pip warns of it and goes on
BUILD_S = 300


@dataclass
class Stage:
    """A stage of a container file: its base, and its instructions as (word, rest)."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [rest for each, rest in self.steps if each == word]


def stages() -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found[name] = Stage(base)
        else:
            stage.steps.append((word, re.sub(r"\s+", " ", rest.strip())))
    return found


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out of the build: the last rule that matches it decides."""
    is_out = False
    parts = path.split("/")
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        rule = line.removeprefix("!")
        if not rule or rule.startswith("#"):
            continue
        heads = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        pattern = rule.removeprefix("**/")
        names = parts if rule.startswith("**/") else heads
        if any(fnmatch.fnmatchcase(each, pattern) for each in names):
            is_out = not line.startswith("!")
    return is_out


def copy_context(source: str, target: Path) -> None:
    """What COPY brings of the checkout: only what is tracked or new, and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", source],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if not is_ignored(name) and (ROOT / name).exists():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place)


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["sh", "-ec", command], cwd=folder, capture_output=True, text=True, timeout=BUILD_S,
        env={"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_build_steps_run_in_clean_folders(tmp_path: Path):
    """What COPY brings is enough for the wheel, and the wheel becomes an environment whose program runs.

    The steps are those of the file, with this Python and folders below a temporary one. Packages that batchmill needs
    come from the environment of the tests.
    """
    wheel, server = stages()["wheel"], stages()["server"]
    source = tmp_path / "src"
    for step in wheel.of("COPY"):
        for name in step.split()[:-1]:
            copy_context(name, source)
    (source / "bin").mkdir()
    for name in ("python3", "pip"):
        script = source / "bin" / name
        words = [sys.executable, *(["-m", "pip"] if name == "pip" else [])]
        script.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        script.chmod(0o755)
    (build,) = wheel.of("RUN")
    run(build.replace("/wheels", f"{tmp_path}/wheels").replace("--no-cache-dir ", ""), source)

    (install,) = [each for each in server.of("RUN") if "pip install" in each]
    places = {
        "/opt/batchmill": f"{tmp_path}/opt",
        "/wheels": f"{tmp_path}/wheels",
        "/usr/local/bin": f"{tmp_path}/local",
    }
    (tmp_path / "local").mkdir()
    for place, real in places.items():
        install = install.replace(place, real)
    install = re.sub(
        r"\S*/uv(?= )", "", install.replace("pip install --no-cache-dir", "pip install --no-deps --no-index")
    )
    install = re.sub(r"\S*/ray(?= )|'ray\S*", "", install)
    run(install, source)
    packages = next((tmp_path / "opt" / "lib").glob("python3*/site-packages"))
    (packages / "of_the_tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    said = run(f"{tmp_path}/local/batchmill --version", tmp_path)
    assert re.search(r"\d+\.\d+\.\d+", said)
    program = run(f"{tmp_path}/opt/bin/python -c 'import batchmill; print(batchmill.__file__)'", tmp_path)
    assert program.startswith(str(packages)), "the program is that of the wheel, not of the checkout"


def test_the_extras_are_those_of_the_project():
    """The extras that the images install exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("server", "cuda"):
        (install,) = [each for each in stages()[name].of("RUN") if "pip install" in each]
        (asked,) = re.findall(r'\$wheel\[([a-z,]+)\]"', install)
        assert set(asked.split(",")) - set(extras) <= COMING
        assert {"postgres", "objects", "ray"} <= set(asked.split(","))


def test_both_images_are_alike():
    """The image for GPUs differs from the server's by its base, the user of its build, and vLLM's Python."""
    server, cuda = stages()["server"], stages()["cuda"]
    for word in ("USER", "WORKDIR", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD", "COPY"):
        assert server.of(word)[-1:] == cuda.of(word)[-1:], word
    assert server.of("RUN") == cuda.of("RUN")
    assert cuda.of("USER")[0] == "root"
    assert "BATCHMILL_VLLM_PYTHON=" in cuda.of("ENV")[0]


def test_an_image_runs_as_a_user_behind_an_init():
    """Bases have a version; the user is no root; process 1 collects orphans; the folder of the data is the user's."""
    for name in ("server", "cuda"):
        stage = stages()[name]
        assert re.search(r":v?\d+\.\d+", stage.base), stage.base
        assert stage.of("USER")[-1] == f"{USER}:{USER}"
        assert stage.of("ENTRYPOINT") == ['["tini", "--", "batchmill"]']
        assert stage.of("STOPSIGNAL") == ["SIGTERM"]
        assert f":{PORT}/ready" in stage.of("HEALTHCHECK")[0]
        assert "BATCHMILL_DATA_DIR=/var/lib/batchmill/data" in stage.of("ENV")[0]
        owned = f"install -d -o {USER} -g {USER} -m 0700 /var/lib/batchmill /var/lib/batchmill/data"
        assert any(owned in each for each in stage.of("RUN"))


def test_the_build_sees_no_secret():
    """Secrets, data, environments and the history of the repository stay out of the build."""
    for path in (
        "deploy/compose/secrets/database_password", ".git/config", ".venv/bin/python", "tests/conftest.py",
        "benchmarks/.data/x", "src/batchmill/__pycache__/a.pyc", "batchmill.toml",
    ):  # fmt: skip
        assert is_ignored(path), path
    for path in ("src/batchmill/__init__.py", "pyproject.toml", "deploy/kubernetes/node-certificate.sh"):
        assert not is_ignored(path), path
