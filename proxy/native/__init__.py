"""The tokens of plain streams, compiled: see `proxy.native.loading`."""
