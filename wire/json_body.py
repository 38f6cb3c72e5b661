"""JSON for the dataclasses of this package."""

import msgspec

_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    """Encode a wire dataclass; non-finite numbers become null."""
    return _encoder.encode(value)
