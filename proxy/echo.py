"""The prompt as the beginning of an answer: its text, and its tokens' log probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.detokenizer import Vocabulary
from proxy.token_text import TokenText, token_text
from wire.services import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """`token_ids`: those of the prompt where their log probabilities are wanted, too."""

    text: str = ""
    token_ids: Sequence[int] = ()
    is_all: bool = False
    """Nothing was to be generated; what an engine has generated all the same is left out."""

    def tokens(self, vocabulary: Vocabulary, logprobs: PromptLogprobs | None) -> tuple[TokenText, ...]:
        """Each with its place in the text; nothing comes before the first, so it has no probability."""
        if not self.token_ids:
            return ()
        assert logprobs is not None, "legs look at it"
        detokenizer = vocabulary.detokenizer()
        tokens: list[TokenText] = []
        num_chars = 0
        for token_id, own in zip(self.token_ids, (None, *logprobs), strict=True):
            tokens.append(token_text(vocabulary, token_id, min(num_chars, len(self.text)), own))
            num_chars += len(detokenizer.push(token_id))
        return tuple(tokens)
