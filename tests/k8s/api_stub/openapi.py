"""As much of the API's OpenAPI document as clients look at: that the server checks unknown fields itself."""

from tests.k8s.api_stub.resources import RESOURCES, Resource
from tests.k8s.api_stub.selectors import Manifest
from tests.k8s.api_stub.store import ApiError


def openapi(parts: list[str]) -> Manifest:
    """What is served below `/openapi`; raises `ApiError` where nothing is."""
    if parts == ["v3"]:
        return {"paths": {_path(r): {"serverRelativeURL": f"/openapi/v3/{_path(r)}"} for r in RESOURCES}}
    found = [r for r in RESOURCES if parts == ["v3", *_path(r).split("/")]]
    if not found:
        raise ApiError(404, "NotFound", "there is no such OpenAPI document")
    info = {"title": "stub", "version": "1"}
    return {"openapi": "3.0.0", "info": info, "paths": {_path_of(r): {"patch": _patch(r)} for r in found}}


def _path(resource: Resource) -> str:
    return f"{'apis' if resource.group else 'api'}/{resource.api_version}"


def _path_of(resource: Resource) -> str:
    place = "namespaces/{namespace}/" if resource.is_namespaced else ""
    return f"/{_path(resource)}/{place}{resource.plural}/{{name}}"


def _patch(resource: Resource) -> Manifest:
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")
    ]
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    return {"parameters": parameters, "responses": {}, "x-kubernetes-group-version-kind": kind}
