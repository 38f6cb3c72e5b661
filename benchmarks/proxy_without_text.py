"""Tandem's proxy with detokenization switched off: every token is the same word.

For `benchmarks.proxy` alone: other routers pass text through, and get it from their engines.
"""

from proxy.detokenizer import Detokenizer, Vocabulary
from proxy.main import main


class OneWord:
    def push(self, token_id: int) -> str:
        return " word"

    def flush(self) -> str:
        return ""


def _detokenizer(vocabulary: Vocabulary, visible_ids: frozenset[int] = frozenset()) -> Detokenizer:
    return OneWord()


if __name__ == "__main__":
    Vocabulary.detokenizer = _detokenizer  # type: ignore[method-assign, assignment]
    raise SystemExit(main())
