"""The compose file: its format, its secrets, and what it opens to whom."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deploy.deploy_files import DEPLOY, PORT, SCHEMAS, documents, known_tables, walk

from batchmill.config import load
from batchmill.services.secrets import box

COMPOSE = DEPLOY / "compose.yaml"
FOLDER = DEPLOY / "compose"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (found,) = documents(COMPOSE)
    return found


def make_secrets(folder: Path) -> None:
    """Run the script as the root of a user namespace, in which the caller's group stands for the container's."""
    script = ["sh", str(FOLDER / "make-secrets.sh"), str(folder)]
    environ = {"PATH": os.environ["PATH"], "BATCHMILL_GROUP": "0"}
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", *script], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_file_has_the_format(compose: dict[str, Any]):
    """The file is one of the compose specification, which refuses a field that it does not know."""
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text())
    checker = jsonschema.Draft202012Validator(schema)
    assert not [f"{list(each.absolute_path)}: {each.message}" for each in checker.iter_errors(compose)]
    assert list(checker.iter_errors({**compose, "services": {"server": {"imagee": "x"}}}))


def test_everything_that_a_service_names_is_there(compose: dict[str, Any]):
    """Networks, volumes, secrets, files and services that a service refers to exist, and all are used."""
    services = compose["services"]
    for kind in ("networks", "secrets"):
        used = {each for service in services.values() for each in service.get(kind, ())}
        assert used == set(compose[kind]), kind
    mounts = [each.split(":")[0] for service in services.values() for each in service.get("volumes", ())]
    assert {each for each in mounts if not each.startswith(".")} == set(compose["volumes"])
    for each in mounts:
        assert not each.startswith(".") or (DEPLOY / each).is_dir(), each
    assert all((DEPLOY / each["file"]).is_file() for each in compose["configs"].values())
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)


def test_services_wait_for_health(compose: dict[str, Any]):
    """Each service that stays has a health check, its own or its image's, and others wait for it, or for its end."""
    services = compose["services"]
    for name, service in services.items():
        stays = service["restart"] == "unless-stopped"
        assert stays == ("healthcheck" in service or name == "server"), name
        for needed, condition in service.get("depends_on", {}).items():
            is_kept = services[needed]["restart"] == "unless-stopped"
            assert condition == {"condition": "service_healthy" if is_kept else "service_completed_successfully"}


def test_ports_are_on_loopback_and_data_is_inside(compose: dict[str, Any]):
    """Every published port is on loopback; the database and the store publish none, on a network without a way out."""
    services = compose["services"]
    ports = [each for service in services.values() for each in service.get("ports", ())]
    assert ports and all(each.startswith("127.0.0.1:") for each in ports)
    assert len({each.rpartition(":")[0] for each in ports}) == len(ports)
    assert compose["networks"]["data"] == {"internal": True}
    for name in ("postgres", "store", "bucket"):
        assert services[name]["networks"] == ["data"] and "ports" not in services[name]


def test_images_have_versions(compose: dict[str, Any]):
    """Each image of others has a version in its tag; the server's is built here."""
    for name, service in compose["services"].items():
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+", service["image"]), name


def test_no_secret_has_a_default(compose: dict[str, Any]):
    """No password is in the file or has a default in it: each comes from a file that make-secrets.sh makes."""
    text = COMPOSE.read_text()
    assert ":-" not in text and not re.search(r"\$\{", text)
    names = [name for each in walk(compose) if isinstance(each, dict) for name in each if isinstance(name, str)]
    said = [each for each in names if re.search("password|secret_access|access_key", each, re.IGNORECASE)]
    assert set(said) == {
        "POSTGRES_PASSWORD_FILE", "GF_SECURITY_ADMIN_PASSWORD__FILE", "database_password", "grafana_password",
    }  # fmt: skip


def test_the_script_makes_every_secret_once(compose: dict[str, Any], tmp_path: Path):
    """Each file that the compose file names is made, with its mode; a second run changes none; no two are equal."""
    make_secrets(tmp_path)
    named = {Path(each["file"]).name for each in compose["secrets"].values()}
    named |= {Path(each).name for service in compose["services"].values() for each in service.get("env_file", ())}
    made = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert set(made) == named
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert modes.pop("store.env") == 0o400 and set(modes.values()) == {0o440}
    assert made.pop("metrics.key") == ""
    assert len(set(made.values())) == len(made) and all(len(each) >= 32 for each in made.values())
    assert not any(character in made["database_password"].strip() for character in "@:/?#'\" ")
    (tmp_path / "secrets.key").chmod(0o600)
    assert len(box.read(tmp_path / "secrets.key").keys) == 1
    make_secrets(tmp_path)
    assert made.items() <= {each.name: each.read_text() for each in tmp_path.iterdir()}.items()


def test_the_secrets_stay_out_of_the_repository():
    """Git ignores the folder of the secrets."""
    ignored = subprocess.run(["git", "check-ignore", "--quiet", str(FOLDER / "secrets" / "store.env")], cwd=DEPLOY)
    assert ignored.returncode == 0


def test_the_server_reads_its_configuration(compose: dict[str, Any], tmp_path: Path):
    """batchmill takes the configuration, and finds the mounted secrets and the names that Prometheus uses in it."""
    source = FOLDER / "batchmill.toml"
    file = tmp_path / "batchmill.toml"
    file.write_text(known_tables(source))
    config = load(environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    assert (config.server.host, config.server.port) == ("0.0.0.0", PORT)
    text = source.read_text()
    for path in re.findall(r"/run/secrets/(\w+)", text):
        assert path in compose["services"]["server"]["secrets"]
    (scrape,) = documents(DEPLOY / "prometheus" / "prometheus.yaml")[0]["scrape_configs"]
    (targets,) = scrape["static_configs"]
    assert {each.partition(":")[0] for each in targets["targets"]} == set(config.server.allowed_hosts)
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
