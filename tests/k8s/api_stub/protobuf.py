"""The little protobuf that clients written in Go send for core kinds: Secrets, ConfigMaps, DeleteOptions.

Field numbers: k8s.io/api/core/v1/generated.proto, k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto.
"""

import base64
from collections.abc import Iterator
from typing import Any

from tests.k8s.api_stub.store import ApiError, Manifest

MAGIC = b"k8s\0"
_METADATA_TEXTS = {1: "name", 2: "generateName", 3: "namespace", 6: "resourceVersion"}
_LABELS, _ANNOTATIONS = 11, 12


def decode(body: bytes) -> Manifest:
    """A message as the JSON it stands for; raises `ApiError` for kinds that are not expected."""
    unknown = dict(_fields(body.removeprefix(MAGIC)))
    type_meta = dict(_fields(unknown[1]))
    kind, message = type_meta[2].decode(), unknown.get(2, b"")
    if kind == "DeleteOptions":
        grace = dict(_fields(message)).get(1)
        return {} if grace is None else {"gracePeriodSeconds": grace}
    if kind not in ("Secret", "ConfigMap"):
        raise ApiError(415, "UnsupportedMediaType", f"protobuf of a {kind}")
    decoded: Manifest = {"apiVersion": type_meta[1].decode(), "kind": kind, "metadata": {}}
    for field, value in _fields(message):
        if field == 1:
            decoded["metadata"] = _metadata(value)
        elif field == 2:
            key, content = _entry(value)
            text = base64.b64encode(content) if kind == "Secret" else content
            decoded.setdefault("data", {})[key] = text.decode()
        elif field == 3 and kind == "Secret":
            decoded["type"] = value.decode()
    return decoded


def _metadata(message: bytes) -> Manifest:
    found: Manifest = {}
    for field, value in _fields(message):
        if field in _METADATA_TEXTS and value:
            found[_METADATA_TEXTS[field]] = value.decode()
        elif field in (_LABELS, _ANNOTATIONS):
            key, content = _entry(value)
            found.setdefault("labels" if field == _LABELS else "annotations", {})[key] = content.decode()
    return found


def _entry(message: bytes) -> tuple[str, bytes]:
    """Key and value of a map's entry."""
    entry = dict(_fields(message))
    return entry[1].decode(), entry.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers with varints and length-delimited values; these messages have no others."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, at = _varint(message, at)
        match tag & 7:
            case 0:
                yield tag >> 3, number
            case 2:
                yield tag >> 3, message[at : at + number]
                at += number
            case wire_type:
                raise ApiError(415, "UnsupportedMediaType", f"protobuf wire type {wire_type}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at
