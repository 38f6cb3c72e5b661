"""Objects, their versions and the history that watches read; no HTTP.

Every write is one event with the next version. After `forget_history` earlier versions are too old to watch.
"""

import base64
import copy
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from tests.k8s.api_stub.fields import DuplicateEntries, Path, leaves, remove_leaves, set_leaf
from tests.k8s.api_stub.resources import BY_PLURAL, Resource
from tests.k8s.api_stub.selectors import Manifest, matches
from tests.k8s.schemas import InvalidManifest, check_manifest

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[str, str, str]
"""Plural, namespace, name."""


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message

    def status(self) -> Manifest:
        body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**body, "message": self.message, "reason": self.reason, "code": self.code}


@dataclass(frozen=True, slots=True)
class Event:
    version: int
    type: EventType
    resource: Resource
    manifest: Manifest
    previous: Manifest | None
    is_lost: bool
    """No watch is told of it."""

    def for_watch(self, label_selector: str, field_selector: str) -> tuple[EventType, Manifest] | None:
        """What a watch with these selectors sees: an object that stops matching has gone for it."""
        if self.is_lost:
            return None
        matches_now = matches(self.manifest, label_selector, field_selector)
        if self.type != "MODIFIED" or self.previous is None:
            return (self.type, self.manifest) if matches_now else None
        matched = matches(self.previous, label_selector, field_selector)
        if matches_now:
            return ("MODIFIED" if matched else "ADDED"), self.manifest
        return ("DELETED", self.manifest) if matched else None


class Store:
    """Everything the API server remembers; `changed` is notified after every write."""

    def __init__(self, kubernetes_version: str) -> None:
        self.kubernetes_version = kubernetes_version
        self.changed = threading.Condition(threading.RLock())
        self.lose_event: Callable[[str, EventType], bool] = lambda plural, type: False
        self.first_known_version = 0
        self._version = 1
        self._objects: dict[Key, Manifest] = {}
        self._owners: dict[Key, dict[str, set[Path]]] = {}
        self._events: list[Event] = []
        for namespace in ("default", "kube-system"):
            self.create(BY_PLURAL["namespaces"], "", {"metadata": {"name": namespace}}, "stub")

    @property
    def version(self) -> int:
        return self._version

    def get(self, resource: Resource, namespace: str, name: str) -> Manifest:
        with self.changed:
            found = self._objects.get((resource.plural, namespace, name))
            if found is None:
                raise ApiError(404, "NotFound", f'{resource.plural} "{name}" not found')
            return copy.deepcopy(found)

    def find(
        self, resource: Resource, namespace: str = "", label_selector: str = "", field_selector: str = ""
    ) -> tuple[list[Manifest], int]:
        """The objects, and the version at which they are such."""
        with self.changed:
            found = [
                copy.deepcopy(manifest)
                for (plural, place, _), manifest in self._objects.items()
                if plural == resource.plural
                and namespace in ("", place)
                and matches(manifest, label_selector, field_selector)
            ]
            return found, self._version

    def events_after(self, version: int) -> list[Event]:
        with self.changed:
            return [event for event in self._events if event.version > version]

    def forget_history(self) -> None:
        with self.changed:
            self._version += 1
            self.first_known_version = self._version
            self._events.clear()
            self.changed.notify_all()

    def create(self, resource: Resource, namespace: str, manifest: Manifest, manager: str) -> Manifest:
        manifest = copy.deepcopy(manifest)
        manifest.setdefault("kind", resource.kind)
        manifest.setdefault("apiVersion", resource.api_version)
        metadata = manifest["metadata"]
        if not metadata.get("name"):
            metadata["name"] = metadata.pop("generateName") + uuid.uuid4().hex[:5]
        if resource.is_namespaced:
            metadata["namespace"] = namespace
        _encode_string_data(manifest)
        with self.changed:
            key = (resource.plural, namespace, metadata["name"])
            if key in self._objects:
                raise ApiError(409, "AlreadyExists", f'{resource.plural} "{metadata["name"]}" already exists')
            if namespace and ("namespaces", "", namespace) not in self._objects:
                raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found')
            self._validate(resource, manifest)
            metadata.update(uid=str(uuid.uuid4()), creationTimestamp=_now(), generation=1)
            if resource.kind == "Namespace":
                manifest["status"] = {"phase": "Active"}
            self._owners[key] = {manager: {path for path, _ in _owned_leaves(manifest)}}
            return self._write("ADDED", resource, key, manifest)

    def update(self, resource: Resource, key: Key, manifest: Manifest, manager: str) -> Manifest:
        """Replace an object; its version, where it is given, must be the one it has."""
        with self.changed:
            old = self.get(resource, *key[1:])
            manifest = copy.deepcopy(manifest)
            _encode_string_data(manifest)
            given = manifest["metadata"].get("resourceVersion")
            if given not in (None, "", old["metadata"]["resourceVersion"]):
                raise ApiError(409, "Conflict", f'{key[0]} "{key[2]}": the object has been modified')
            for name in ("uid", "creationTimestamp", "generation", "resourceVersion", "namespace"):
                if name in old["metadata"]:
                    manifest["metadata"][name] = old["metadata"][name]
            self._validate(resource, manifest)
            _check_immutable(resource, old, manifest)
            self._own_what_changed(key, old, manifest, manager)
            return self._replace(resource, key, old, manifest)

    def apply(
        self, resource: Resource, namespace: str, name: str, manifest: Manifest, manager: str, force: bool
    ) -> Manifest:
        """Server-side apply: what `manager` applied before and does not now goes, unless others own it."""
        key = (resource.plural, namespace, name)
        manifest = copy.deepcopy(manifest)
        _encode_string_data(manifest)
        try:
            wanted = dict(_owned_leaves(manifest))
        except DuplicateEntries as error:
            raise ApiError(500, "InternalError", f"failed to create typed patch object: .{error}") from None
        with self.changed:
            if key not in self._objects:
                return self.create(resource, namespace, manifest, manager)
            old = self.get(resource, namespace, name)
            owners = self._owners[key]
            self._settle_conflicts(key, old, wanted, manager, force)
            others = set().union(*(paths for owner, paths in owners.items() if owner != manager))
            gone = owners.get(manager, set()) - set(wanted) - others
            new = copy.deepcopy(old)
            for path, value in wanted.items():
                set_leaf(new, path, value)
            remove_leaves(new, gone)
            owners[manager] = set(wanted)
            self._validate(resource, new)
            _check_immutable(resource, old, new)
            return self._replace(resource, key, old, new)

    def delete(self, resource: Resource, key: Key, grace_s: int | None = None) -> Manifest:
        """A pod on a node is marked as terminating first, unless `grace_s` is 0."""
        with self.changed:
            old = self.get(resource, *key[1:])
            if resource.kind == "Pod" and grace_s != 0 and old["spec"].get("nodeName"):
                grace_s = old["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
                if "deletionTimestamp" not in old["metadata"]:
                    old["metadata"].update(deletionTimestamp=_now(), deletionGracePeriodSeconds=grace_s)
                    return self._write("MODIFIED", resource, key, old)
                return old
            return self._write("DELETED", resource, key, old)

    def _settle_conflicts(
        self, key: Key, old: Manifest, wanted: dict[Path, Any], manager: str, force: bool
    ) -> None:
        live = dict(_owned_leaves(old))
        for owner, paths in self._owners[key].items():
            if owner == manager:
                continue
            disputed = {path for path in paths & set(wanted) if live.get(path) != wanted[path]}
            if disputed and not force:
                where = ", ".join(sorted("." + ".".join(str(part) for part in path) for path in disputed))
                raise ApiError(
                    409, "Conflict", f'Apply failed with 1 conflict: conflict with "{owner}": {where}'
                )
            paths -= disputed

    def _own_what_changed(self, key: Key, old: Manifest, new: Manifest, manager: str) -> None:
        before, after = dict(_owned_leaves(old)), dict(_owned_leaves(new))
        changed = {path for path, value in after.items() if before.get(path) != value}
        owners = self._owners[key]
        for paths in owners.values():
            paths -= changed
            paths &= set(after)
        owners.setdefault(manager, set()).update(changed)

    def _replace(self, resource: Resource, key: Key, old: Manifest, new: Manifest) -> Manifest:
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        return old if new == old else self._write("MODIFIED", resource, key, new)

    def _write(self, type: EventType, resource: Resource, key: Key, manifest: Manifest) -> Manifest:
        previous = self._objects.get(key)
        self._version += 1
        manifest["metadata"]["resourceVersion"] = str(self._version)
        if type == "DELETED":
            del self._objects[key]
            self._owners.pop(key, None)
        else:
            self._objects[key] = manifest
        is_lost = self.lose_event(resource.plural, type)
        event = Event(self._version, type, resource, copy.deepcopy(manifest), previous, is_lost)
        self._events.append(event)
        self.changed.notify_all()
        return copy.deepcopy(manifest)

    def _validate(self, resource: Resource, manifest: Manifest) -> None:
        if not resource.is_built_in:
            return
        try:
            check_manifest(manifest, self.kubernetes_version)
        except InvalidManifest as error:
            raise ApiError(422, "Invalid", str(error)) from None
        _check_selector(resource, manifest)


def _owned_leaves(manifest: Manifest) -> list[tuple[Path, Any]]:
    """Leaves that a manager can own."""
    metadata = {k: v for k, v in manifest.get("metadata", {}).items() if k in ("labels", "annotations")}
    rest = {k: v for k, v in manifest.items() if k not in ("apiVersion", "kind", "metadata", "status")}
    return list(leaves({**rest, **({"metadata": metadata} if metadata else {})}))


def _check_selector(resource: Resource, manifest: Manifest) -> None:
    if resource.kind in ("Deployment", "StatefulSet", "ReplicaSet"):
        spec = manifest["spec"]
        labels = spec["template"]["metadata"].get("labels", {})
        if not (spec["selector"].get("matchLabels") or {}).items() <= labels.items():
            name = manifest["metadata"]["name"]
            message = f'{resource.kind} "{name}" is invalid: `selector` does not match template `labels`'
            raise ApiError(422, "Invalid", message)


def _check_immutable(resource: Resource, old: Manifest, new: Manifest) -> None:
    if resource.kind in ("Deployment", "StatefulSet", "ReplicaSet"):
        for field in ("selector", "serviceName"):
            if old["spec"].get(field) != new["spec"].get(field):
                name = old["metadata"]["name"]
                message = f'{resource.kind} "{name}" is invalid: spec.{field}: field is immutable'
                raise ApiError(422, "Invalid", message)
    if resource.kind == "RoleBinding" and old["roleRef"] != new["roleRef"]:
        raise ApiError(422, "Invalid", "cannot change roleRef")


def _encode_string_data(manifest: Manifest) -> None:
    if manifest.get("kind") == "Secret" and "stringData" in manifest:
        data = {k: base64.b64encode(v.encode()).decode() for k, v in manifest.pop("stringData").items()}
        manifest.setdefault("data", {}).update(data)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
