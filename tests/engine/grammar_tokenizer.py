"""A tokenizer for the tiny models' 128 tokens: printable ASCII, space and line end, and some pairs."""

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.grammars import Grammars

VOCAB_SIZE = 128
EOS = 2
_PAIRS = (
    '"a', '":', ", ", '{"', '"}', "tr", "ue", "fa", "ls", "nu", "ll", "12", "00", "[]", "{}", "ab", "cd",
    "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx", "yz", "\n\n",
)  # fmt: skip


def vocabulary() -> list[str]:
    """Token texts by id, in the byte-level alphabet."""
    texts = [*map(chr, range(33, 127)), " ", "\n", *_PAIRS]
    encoded = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in texts]
    return ["<s>", "<pad>", "</s>", *encoded][:VOCAB_SIZE]


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE({text: i for i, text in enumerate(vocabulary())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<pad>", "</s>")])
    return tokenizer


def tiny_grammars() -> Grammars:
    return Grammars(tiny_tokenizer, VOCAB_SIZE, (EOS,))


def text_of(token_ids: list[int]) -> str:
    text: str = tiny_tokenizer().decode(token_ids, skip_special_tokens=True)
    return text
