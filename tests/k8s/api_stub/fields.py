"""Patches, and which manager owns which field (server-side apply).

An object is seen as its leaves: a path for every scalar and every list taken as a whole. Elements of a
list with keys, such as containers by name, have the key's values in their path.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

Manifest = dict[str, Any]
Path = tuple[Any, ...]

LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
}
PORT_KEYS = {"containers": ("containerPort", "protocol"), "spec": ("port", "protocol")}
"""`ports` of a container and of a Service; elsewhere they are one value."""


class DuplicateEntries(Exception):
    """Two elements of a list have the same key."""


def merge(into: Manifest, patch: Manifest) -> None:
    """JSON merge patch (RFC 7386)."""
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)


def strategic_merge(into: Manifest, patch: Manifest, path: Path = ()) -> None:
    """Like `merge`, but lists with keys are merged by element; `$patch: delete` takes one out."""
    for name, value in patch.items():
        keys = list_keys((*path, name))
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            strategic_merge(into[name], value, (*path, name))
        elif keys and isinstance(value, list) and isinstance(into.get(name), list):
            _merge_elements(into[name], value, keys, (*path, name))
        elif not name.startswith("$"):
            into[name] = copy.deepcopy(value)


def _merge_elements(
    elements: list[Manifest], patches: list[Manifest], keys: tuple[str, ...], path: Path
) -> None:
    for patch in patches:
        found = next((e for e in elements if element_key(e, keys) == element_key(patch, keys)), None)
        if patch.get("$patch") == "delete":
            if found is not None:
                elements.remove(found)
        elif found is None:
            elements.append(copy.deepcopy(patch))
        else:
            strategic_merge(found, patch, (*path, element_key(patch, keys)))


def list_keys(path: Path) -> tuple[str, ...] | None:
    """The fields that tell elements of the list at `path` apart; None where the list is one value."""
    name = path[-1]
    if name == "ports":
        owner = next((part for part in reversed(path[:-1]) if isinstance(part, str)), None)
        return PORT_KEYS.get(owner or "")
    return LIST_KEYS.get(name) if isinstance(name, str) else None


def element_key(element: Manifest, keys: tuple[str, ...]) -> Path:
    return tuple(element.get(key, "TCP" if key == "protocol" else None) for key in keys)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path; raises `DuplicateEntries`."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, list) and path and (keys := list_keys(path)):
        seen: set[Path] = set()
        for element in value:
            key = element_key(element, keys)
            if key in seen:
                where = ".".join(str(part) for part in path)
                raise DuplicateEntries(
                    f"{where}: duplicate entries for key {dict(zip(keys, key, strict=True))}"
                )
            seen.add(key)
            yield from leaves(element, (*path, key))
    else:
        yield path, value


def set_leaf(manifest: Manifest, path: Path, value: Any) -> None:
    at: Any = manifest
    for depth, part in enumerate(path[:-1]):
        at = _step_into(at, part, path[: depth + 1], is_list=isinstance(path[depth + 1], tuple))
    # An empty mapping claims that there is one, not that nothing is in it.
    if value != {} or not isinstance(at.get(path[-1]), dict):
        at[path[-1]] = copy.deepcopy(value)


def _step_into(at: Any, part: Any, path: Path, is_list: bool) -> Any:
    if isinstance(part, tuple):
        found = _element(at, part, path[:-1])
        if found is None:
            found = dict(zip(list_keys(path[:-1]) or (), part, strict=True))
            at.append(found)
        return found
    if not isinstance(at.get(part), list if is_list else dict):
        at[part] = [] if is_list else {}
    return at[part]


def remove_leaves(manifest: Manifest, paths: Iterable[Path]) -> None:
    """Take leaves out, and whatever is empty without them."""
    # An element is found by its key, which therefore goes last.
    for path in sorted(paths, key=_is_key):
        _remove_leaf(manifest, path)


def _is_key(path: Path) -> bool:
    if len(path) < 3 or not isinstance(path[-2], tuple):
        return False
    return path[-1] in (list_keys(path[:-2]) or ())


def _remove_leaf(manifest: Manifest, path: Path) -> None:
    chain: list[tuple[Any, Any]] = []
    at: Any = manifest
    for depth, part in enumerate(path):
        chain.append((at, part))
        at = _element(at, part, path[:depth]) if isinstance(part, tuple) else at.get(part)
        if at is None:
            return
    if isinstance(at, dict) and at:
        return  # it was applied as empty, and others have filled it
    for owner, part in reversed(chain):
        if isinstance(part, tuple):
            owner[:] = [element for element in owner if element]
        else:
            owner.pop(part, None)
        if owner:
            return


def _element(elements: list[Manifest], key: Path, path: Path) -> Manifest | None:
    keys = list_keys(path)
    assert keys is not None
    return next((element for element in elements if element_key(element, keys) == key), None)
