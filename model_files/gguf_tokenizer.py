"""Builds a `tokenizers` tokenizer from the vocabulary and merge tables inside a GGUF file.

Only byte-level BPE (`tokenizer.ggml.model` = gpt2). The pre-tokenizers repeat the published tokenizer.json
of the model that each `tokenizer.ggml.pre` stands for.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from model_files.errors import ModelFilesError
from model_files.fields import Fields

_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS_AND_SPACES}"
_GPT2, _SMOLLM, _LLAMA3, _QWEN2 = ("gpt-2", "default"), ("smollm",), ("llama-bpe", "llama3"), ("qwen2",)


def build_tokenizer(fields: Fields) -> Tokenizer:
    """The tokenizer of a GGUF's metadata; ModelFilesError names a kind that is not supported."""
    kind, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelFilesError(
            f"{fields.source}: tokenizer {kind!r} is not supported, only byte-level BPE; "
            "use this model as a Hugging Face directory with a tokenizer.json"
        )
    tokens = fields.texts("tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(fields, tokens, ignore_merges=pre in _LLAMA3))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, fields.source)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    _add_special_tokens(tokenizer, fields, tokens)
    _add_post_processor(tokenizer, fields, tokens, adds_bos_by_default=pre in _LLAMA3)
    return tokenizer


def _bpe(fields: Fields, tokens: list[str], *, ignore_merges: bool) -> BPE:
    merges = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise ModelFilesError(f"{fields.source}: merge {merge!r} has no two parts; the file is damaged")
        merges.append((left, right))
    try:
        return BPE({token: index for index, token in enumerate(tokens)}, merges, ignore_merges=ignore_merges)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ModelFilesError(f"{fields.source}: its tokenizer tables disagree ({error})") from None


def _pre_tokenizer(pre: str, source: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    if pre in _LLAMA3 or pre in _QWEN2:
        pattern = Regex(_LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT)
        split = pre_tokenizers.Split(pattern, behavior="isolated", invert=False)
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    raise ModelFilesError(
        f"{source}: pre-tokenizer {pre!r} is not supported; use this model as a Hugging Face directory"
    )


def _add_special_tokens(tokenizer: Tokenizer, fields: Fields, tokens: list[str]) -> None:
    kinds = fields.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ModelFilesError(
            f"{fields.source}: {len(tokens)} tokens but {len(kinds)} token types; damaged file"
        )
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])


def _add_post_processor(
    tokenizer: Tokenizer, fields: Fields, tokens: list[str], *, adds_bos_by_default: bool
) -> None:
    bos_id = fields.optional_integer("tokenizer.ggml.bos_token_id")
    if bos_id is None or not 0 <= bos_id < len(tokens):
        return
    if fields.flag("tokenizer.ggml.add_bos_token", adds_bos_by_default):
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_id)]
        )
