"""Tandem's proxy with detokenization switched off: every token is the same word.

For `benchmarks.proxy` alone: other routers pass text through, and get it from their engines.
"""

from proxy.detokenizer import Vocabulary
from proxy.main import main


def _find_bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    return b" word"


if __name__ == "__main__":
    Vocabulary._find_bytes = _find_bytes  # type: ignore[method-assign, assignment]
    raise SystemExit(main())
