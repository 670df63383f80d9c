"""The manifests for Kubernetes: their formats, what they refer to, and who may reach whom."""

from __future__ import annotations

import json
import os
import re
import subprocess
from copy import deepcopy
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from deploy.deploy_files import DEPLOY, PAGE, PORT, SCHEMAS, USER, documents, known_tables, walk

from batchmill.config import load
from batchmill.jobs.pools.pool import DRAIN_S as WORKERS_DRAIN_S
from batchmill.server.metrics import TRACES_DRAIN_S
from batchmill.services.functions.late_replies import DRAIN_S as LATE_DRAIN_S
from batchmill.services.remote.tasks import SUBMIT_DRAIN_S
from batchmill.serving import REQUESTS_DRAIN_S, ROWS_DRAIN_S

FOLDER = DEPLOY / "kubernetes"
RAY = {"ray.io/cluster": "batchmill"}  # labels that the operator gives each pod of the cluster
SERVER = {"app.kubernetes.io/name": "batchmill", "app.kubernetes.io/component": "server"}
PODS = {
    "server": SERVER,
    "first key": {"app.kubernetes.io/name": "batchmill", "app.kubernetes.io/component": "first-key"},
    "head": {**RAY, "ray.io/node-type": "head", "app.kubernetes.io/component": "ray"},
    "worker": {**RAY, "ray.io/node-type": "worker", "app.kubernetes.io/component": "ray"},
    "database": {"app.kubernetes.io/name": "postgresql"},
    "other": {"app.kubernetes.io/name": "other"},
}
STOP_S = sum((REQUESTS_DRAIN_S, LATE_DRAIN_S, SUBMIT_DRAIN_S, ROWS_DRAIN_S, WORKERS_DRAIN_S, TRACES_DRAIN_S))

Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    """Every manifest of the kustomization, and the job beside it."""
    (kustomization,) = documents(FOLDER / "kustomization.yaml")
    return [each for name in [*kustomization["resources"], "first-key.yaml"] for each in documents(FOLDER / name)]


def of_kind(kind: str) -> list[Manifest]:
    return [each for each in manifests() if each["kind"] == kind]


def pod_specs() -> dict[str, Manifest]:
    """Name -> the spec of each pod."""
    (deployment,), (job,), (ray,) = of_kind("Deployment"), of_kind("Job"), of_kind("RayCluster")
    found = {"server": deployment, "first key": job, "head": ray["spec"]["headGroupSpec"]}
    found |= {group["groupName"]: group for group in ray["spec"]["workerGroupSpecs"]}
    return {name: each.get("spec", each)["template"]["spec"] for name, each in found.items()}


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def problems(manifest: Manifest) -> list[str]:
    schemas = json.loads((SCHEMAS / "kubernetes.json").read_text())
    schema = schemas["kinds"][f"{manifest['apiVersion']}/{manifest['kind']}"]
    checker = jsonschema.Draft7Validator({**schema, "definitions": schemas["definitions"]})
    return [f"{manifest['kind']} {list(each.absolute_path)}: {each.message}" for each in checker.iter_errors(manifest)]


def test_manifests_have_their_formats():
    """Each manifest is what Kubernetes and KubeRay take; neither takes a field that it does not know."""
    assert not [each for manifest in manifests() for each in problems(manifest)]
    for kind, place in (("Deployment", ("template", "spec")), ("RayCluster", ("headGroupSpec", "template", "spec"))):
        wrong = deepcopy(of_kind(kind)[0])
        found = wrong["spec"]
        for name in place:
            found = found[name]
        found["terminationGracePeriod"] = 1
        assert problems(wrong)


def test_the_kustomization_has_every_file():
    """Each file of the folder is a resource, or the kustomization's own, or applied by hand as the page says."""
    (kustomization,) = documents(FOLDER / "kustomization.yaml")
    named = {*kustomization["resources"], *kustomization["configurations"]}
    named |= {file for each in kustomization["configMapGenerator"] for file in each["files"]}
    own = {"kustomization.yaml", "first-key.yaml", "node-certificate.sh"}
    assert {each.name for each in FOLDER.iterdir()} == named | own
    images = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in kustomization["images"]}
    used = {each["image"] for spec in pod_specs().values() for each in containers(spec)}
    assert used == {*images, images["batchmill"]}, "first-key.yaml has the server's image"
    for image in images.values():
        assert f"-t {image} ." in PAGE


def test_what_pods_refer_to_is_there():
    """Secrets are created on the page with the keys that pods use, volumes are declared, and service accounts exist."""
    created = {
        name: keys
        for kind, name, keys in re.findall(r"create secret (tls|generic) ([\w-]+) (.*)", PAGE.replace("\\\n", ""))
    }
    (configs,) = documents(FOLDER / "kustomization.yaml")[0]["configMapGenerator"]
    accounts = {each["metadata"]["name"] for each in of_kind("ServiceAccount")}
    used: set[str] = set()
    for spec in pod_specs().values():
        volumes = {each["name"] for each in spec["volumes"]}
        mounts = [mount for each in containers(spec) for mount in each.get("volumeMounts", ())]
        assert {each["name"] for each in mounts} == volumes
        assert spec.get("serviceAccountName") in {None, *accounts}
        for each in walk(spec):
            if not isinstance(each, dict):
                continue
            if key := each.get("secretKeyRef"):
                assert re.search(rf"={key['key']}=|literal={key['key']}=", created[key["name"]]), key
                used.add(key["name"])
            used |= {
                each[kind][name] for kind, name in (("secretRef", "name"), ("secret", "secretName")) if kind in each
            }
            if "configMap" in each:
                assert each["configMap"] == {"name": configs["name"]}
    assert used == set(created)


def test_pods_have_no_privileges():
    """Every container runs as the image's user, without privileges, on a file system that it cannot write."""
    for name, spec in pod_specs().items():
        assert spec["securityContext"]["runAsUser"] == USER and spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        for each in containers(spec):
            security = each["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= set(each["resources"])
        if name != "head":  # the operator's account of the head may scale the cluster
            assert spec["automountServiceAccountToken"] is False


def test_only_init_containers_see_the_authority():
    """The key that signs nodes is mounted into the container that makes the certificate and into no other."""
    for spec in pod_specs().values():
        for each in containers(spec):
            sees = any(mount["name"] == "authority" for mount in each.get("volumeMounts", ()))
            assert sees == (each["name"] == "certificate")


def test_every_ray_process_has_token_and_tls():
    """Every container with Ray has the token, and TLS with the certificate of its node."""
    (ray,) = of_kind("RayCluster")
    assert ray["spec"]["authOptions"] == {"mode": "token", "secretName": "batchmill-ray-token"}
    found = [ray["spec"]["autoscalerOptions"]]
    found += [each for name, spec in pod_specs().items() for each in containers(spec) if name != "first key"]
    for each in found:
        if each.get("name") == "certificate":
            continue
        environ = {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in each["env"]}
        assert environ["RAY_AUTH_MODE"] == "token" and environ["RAY_USE_TLS"] == "1"
        assert environ["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": "batchmill-ray-token", "key": "auth_token"}}
        folders = {mount["mountPath"] for mount in each["volumeMounts"]}
        for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
            assert str(Path(environ[name]).parent) in folders


def test_workers_never_get_the_database():
    """Only the server and the job of the first key have the database's password and the key file."""
    for name, spec in pod_specs().items():
        text = json.dumps(spec)
        has = ("batchmill-database" in text, "batchmill-key" in text)
        assert has == ((True, True) if name in ("server", "first key") else (False, False)), name


def test_a_server_may_be_replaced_at_any_time():
    """A rollout waits for no standby, no budget holds the owner, and two servers share no node."""
    (deployment,), (budget,), (service,) = of_kind("Deployment"), of_kind("PodDisruptionBudget"), of_kind("Service")
    spec = deployment["spec"]
    assert spec["replicas"] == 2 == spec["strategy"]["rollingUpdate"]["maxUnavailable"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == SERVER == spec["selector"]["matchLabels"] == service["spec"]["selector"]
    assert not selects(budget["spec"]["selector"], SERVER)
    assert selects(budget["spec"]["selector"], PODS["worker"])
    (term,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname" and term["labelSelector"]["matchLabels"] == SERVER
    (server,) = spec["template"]["spec"]["containers"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert "httpGet" not in server["livenessProbe"], "a server that waits for its database is not restarted"
    assert server["ports"] == [{"name": "http", "containerPort": PORT}]


def test_stopping_has_the_time_it_needs():
    """Whatever stops a server waits longer than its steps take together, and the page says how long they take."""
    spec = pod_specs()["server"]
    before = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= STOP_S + before
    unit = (DEPLOY / "systemd" / "batchmill.service").read_text()
    (systemd,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    (compose,) = re.findall(r"stop_grace_period: (\d+)s #", (DEPLOY / "compose.yaml").read_text())
    assert int(systemd) >= STOP_S and int(compose) >= STOP_S
    table = PAGE.split("<!-- drain -->")[1].split("\n\n")[0]
    assert sum(map(int, re.findall(r"\| (\d+) s \|$", table, re.MULTILINE))) == STOP_S
    shown = (f"`TimeoutStopSec={systemd}`", f"`stop_grace_period: {compose}s`")
    assert all(each in table for each in (*shown, f"`terminationGracePeriodSeconds: {STOP_S + before + 15:.0f}`"))


# -- who reaches whom -------------------------------------------------------------------------------------------------


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, "the tests read no other selectors"
    return selector.get("matchLabels", {}).items() <= labels.items()


def allows(rules: list[Manifest], side: str, other: str | dict[str, str], port: int) -> bool:
    """Whether rules admit another pod of the namespace, by name, or one of a namespace with these labels."""
    for rule in rules:
        if rule.get("ports") and port not in [each["port"] for each in rule["ports"]]:
            continue
        peers = rule.get(side)
        if peers is None:
            return True
        for peer in peers:
            if isinstance(other, str) and "podSelector" in peer and selects(peer["podSelector"], PODS[other]):
                return True
            if isinstance(other, dict) and "namespaceSelector" in peer and selects(peer["namespaceSelector"], other):
                return True
    return False


def policies(name: str) -> list[Manifest]:
    return [each["spec"] for each in of_kind("NetworkPolicy") if selects(each["spec"]["podSelector"], PODS[name])]


def reaches(source: str | dict[str, str], target: str, port: int) -> bool:
    ingress = [rule for each in policies(target) for rule in each.get("ingress", ())]
    if not allows(ingress, "from", source, port):
        return False
    if isinstance(source, dict):
        return True
    return allows([rule for each in policies(source) for rule in each.get("egress", ())], "to", target, port)


def test_who_may_reach_whom():
    """The table of the network: clients the server, the server Ray and the database, and workers only each other."""
    client, monitoring, stranger = {"batchmill/client": "true"}, {"batchmill/monitoring": "true"}, {"team": "x"}
    operator = {"kubernetes.io/metadata.name": "kuberay-system"}
    yes = [
        (client, "server", 8000), (monitoring, "server", 8000), (monitoring, "worker", 8080),
        ("server", "database", 5432), ("first key", "database", 5432), ("server", "head", 6379),
        ("server", "worker", 31000), ("worker", "head", 6379), ("worker", "worker", 31000), ("head", "worker", 31000),
        ("worker", "server", 31000), (operator, "head", 8265),
    ]  # fmt: skip
    no = [
        (stranger, "server", 8000), (stranger, "head", 6379), (client, "head", 6379), (client, "head", 8265),
        (monitoring, "head", 6379), (client, "database", 5432), ("worker", "database", 5432),
        ("head", "database", 5432),
        ("other", "head", 6379), ("other", "server", 8000), ("other", "database", 5432), (operator, "worker", 31000),
        ("first key", "head", 6379),
    ]  # fmt: skip
    assert [each for each in yes if not reaches(*each)] == []
    assert [each for each in no if reaches(*each)] == []


def test_workers_reach_no_private_address():
    """What a worker may reach outside of the namespace excludes private networks and the cloud's metadata."""
    blocks = [each["ipBlock"] for each in walk(policies("worker")) if isinstance(each, dict) and "ipBlock" in each]
    (block,) = blocks
    assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["except"])


# -- files that pods use ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the authority of the page's commands, and the certificate that a pod makes with it."""
    folder = tmp_path_factory.mktemp("node")
    (command,) = re.findall(r"openssl req -x509(?:.*\\\n)*.*", PAGE)
    done = subprocess.run(["sh", "-ec", command], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (folder / "node").mkdir()
    script = ["sh", str(FOLDER / "node-certificate.sh"), str(folder), str(folder / "node")]
    environ = {"PATH": os.environ["PATH"], "POD_IP": "10.1.2.3"}
    done = subprocess.run(script, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder / "node"


def test_a_node_gets_a_certificate_of_the_authority(node: Path):
    """The certificate is the authority's, for the pod's address and Ray's head, as server and as client."""
    certificate = x509.load_pem_x509_certificate((node / "tls.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((node / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ip_address("10.1.2.3") in names.get_values_for_type(x509.IPAddress)
    assert "batchmill-head-svc" in names.get_values_for_type(x509.DNSName)
    usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert usages == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_after_utc > datetime.now(UTC)
    assert sorted(each.name for each in node.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert (node / "tls.key").stat().st_mode & 0o077 == 0


def test_a_node_without_an_address_is_refused(tmp_path: Path):
    """The script says which variable it lacks."""
    script = ["sh", str(FOLDER / "node-certificate.sh"), str(tmp_path), str(tmp_path)]
    done = subprocess.run(script, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60)
    assert done.returncode and "POD_IP" in done.stderr


def test_the_server_reads_its_configuration(tmp_path: Path):
    """batchmill takes the configuration; the key file is where the pod mounts it, outside of the data directory."""
    (tmp_path / "batchmill.toml").write_text(known_tables(FOLDER / "batchmill.toml"))
    config = load(environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    assert (config.server.host, config.server.port) == ("0.0.0.0", PORT)
    for name in ("server", "first key"):
        (container,) = pod_specs()[name]["containers"]
        environ = {each["name"]: each.get("value") for each in container["env"]}
        mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
        key = mounts[str(config.secrets_key)]
        assert key["subPath"] == "secrets.key" and key["readOnly"]
        assert not str(config.secrets_key).startswith(environ["BATCHMILL_DATA_DIR"])
        assert environ["BATCHMILL_CONFIG"] == "/etc/batchmill/config/batchmill.toml"
        data = Path(environ["BATCHMILL_DATA_DIR"])
        assert str(data.parent) in mounts and str(data) not in mounts, "a mounted folder belongs to root"
