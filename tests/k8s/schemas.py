"""Kubernetes' strict schemas from the package kubernetes-validate, each read once."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
from referencing import Registry, Resource


class InvalidManifest(ValueError):
    """Kubernetes would refuse it; the message says where and why."""


def check_manifest(manifest: dict[str, Any], kubernetes: str) -> None:
    """Raises `InvalidManifest`, also for fields that Kubernetes does not know."""
    group, _, version = str(manifest["apiVersion"]).rpartition("/")
    name = "-".join(filter(None, [manifest["kind"].lower(), group.split(".")[0], version]))
    error = next(_validator(name, kubernetes).iter_errors(manifest), None)
    if error is not None:
        where = ".".join(str(part) for part in error.path)
        title = manifest["metadata"].get("name")
        raise InvalidManifest(f'{manifest["kind"]} "{title}" is invalid: {where}: {error.message}')


@cache
def _validator(name: str, kubernetes: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_read(name, kubernetes), registry=_registry(kubernetes))


@cache
def _registry(kubernetes: str) -> Registry[Any]:
    return Resource.from_contents(_read("_definitions", kubernetes)) @ Registry()


def _read(name: str, kubernetes: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{kubernetes}.0-local-strict"
    return json.loads((folder / f"{name}.json").read_text())
