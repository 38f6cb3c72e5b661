"""Exceptions of kv_transfer.

    TransferError
    ├── SettingsError           an option is out of range; the message names it
    ├── TransportUnavailable    a transport cannot be loaded here; the message says what to install or set
    ├── BindError               the control or data address cannot be listened on
    ├── LayoutError             a region, an offer or a pull that contradicts the memory layout
    ├── MessageError            bytes from a peer that are not a valid message
    └── ReadError               a read that could not be started
        └── PeerLost            because the peer's process or link is gone

A peer's failure is an event (`Failed`), never an exception that leaves the pump thread.
"""


class TransferError(Exception):
    """Root of everything raised here."""


class SettingsError(TransferError, ValueError):
    """A setting is out of range."""


class TransportUnavailable(TransferError):
    """The transport asked for cannot be loaded on this machine."""


class BindError(TransferError, OSError):
    """An address cannot be listened on."""


class LayoutError(TransferError, ValueError):
    """Block ids, regions or token counts that do not fit the layout."""


class MessageError(TransferError, ValueError):
    """Bytes that are not a valid control message."""


class ReadError(TransferError):
    """A read could not be started."""


class PeerLost(ReadError):
    """The peer's process or the link to it is gone."""
