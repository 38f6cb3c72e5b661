"""The listening socket of an HTTP server."""

import socket

LISTEN_BACKLOG = 2048


class ListenError(OSError):
    """The address cannot be listened on; the message names the options to change."""


def inherited_listener(descriptor: int) -> socket.socket:
    """The listening socket that a parent has bound and left open for this process."""
    return socket.socket(fileno=descriptor)


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening socket on `host`; port 0 takes a free one. `ListenError` when the address is taken.

    Named as TCP, because asyncio turns Nagle's delay (40 ms an answer) off only on such sockets.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from error
    return listener
