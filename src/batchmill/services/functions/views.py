"""Deployed functions as people and clients see them: nothing of where they lie on the server."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from batchmill.services.functions.examples import curl_examples
from batchmill.services.functions.names import MAIN
from batchmill.services.functions.records import READY
from batchmill.wire.deploys import Backend, Deployed, ModelVersion, Route
from batchmill.wire.native import AliasInfo, BackendInfo, DeployReply, FunctionDetail, VersionInfo


def version_info(version: ModelVersion) -> VersionInfo:
    told = VersionInfo(
        version.name, version.branch, version.number, version.state, version.created, version.finished,
        version.source, version.error, project=version.project, key=version.key, is_shared=version.is_shared,
    )  # fmt: skip
    spec = version.spec
    if spec is None or spec.function is None or version.state != READY:
        return told
    function, limits = spec.function, spec.limits
    return replace(
        told,
        interface=function.interface, digest=function.digest, workers=spec.workers, gpus=function.gpus,
        batch_size=function.batch_size, batch_window_s=function.batch_window_s, timeout_s=limits.attempt_timeout_s,
        memory_bytes=limits.memory_bytes, is_idempotent=function.is_idempotent,
    )  # fmt: skip


def deploy_reply(deployed: Deployed) -> DeployReply:
    return DeployReply(version_info(deployed.version), deployed.is_new)


def alias_info(route: Route) -> AliasInfo:
    return AliasInfo(route.label[1:], _backends(route.backends), _backends(route.mirrors), route.changed)


def backends_of(told: Sequence[BackendInfo]) -> list[Backend]:
    return [Backend(each.branch, each.number, each.weight) for each in told]


def _backends(told: Sequence[Backend]) -> list[BackendInfo]:
    return [BackendInfo(each.number, each.branch, each.weight) for each in told]


def detail(name: str, versions: list[ModelVersion], routes: list[Route], url: str) -> FunctionDetail:
    """A function whole. `url`: the address of the server that its examples are to go to."""
    latest = {each.label: each.backends[0].number for each in routes if not each.label.startswith("@")}
    branch = MAIN if MAIN in latest or not latest else next(iter(latest))
    shown = [each for each in versions if (each.branch, each.number) == (branch, latest.get(branch))]
    interface = shown[0].spec.function.interface if shown and shown[0].spec and shown[0].spec.function else None
    return FunctionDetail(
        name,
        latest,
        [alias_info(each) for each in routes if each.label.startswith("@")],
        [version_info(each) for each in versions],
        interface,
        {} if interface is None else curl_examples(name, branch, interface, url),
    )
