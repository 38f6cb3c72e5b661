"""The compiled path of tokens that are text and nothing else, where this installation has it.

Of a token that goes on with a plain stream, four fifths of what the proxy did was to find out that nothing
special is to be done. `src/` does that for all parts of a frame at once; whatever is not plain is left to
Python, which does it all where nothing was compiled.
"""

from pathlib import Path

from processes.compiled_sources import digest_of

REASON: str | None = None
"""Why there is nothing compiled."""

try:
    from proxy.native._plain_streams import SOURCES, Outlet, PlainStream, PlainStreams, Words
except ImportError as error:
    from proxy.native.absent import (  # type: ignore[assignment]
        Outlet,
        PlainStream,
        PlainStreams,
        Words,
    )

    REASON = f"it was not built, for want of a C++ compiler when Tandem was installed ({error})"
else:
    if digest_of(Path(__file__).parent / "src") not in (None, SOURCES):
        REASON = "it was built from other sources than lie here; install Tandem again"

IS_COMPILED = REASON is None

__all__ = ["IS_COMPILED", "REASON", "Outlet", "PlainStream", "PlainStreams", "Words"]
