"""Grammars for structured output: compiled by threads beside the step loop, kept for later requests.

xgrammar takes seconds to import, so that happens with the first grammar, in one of these threads. Most
grammars take milliseconds, but there are short ones that take minutes: nobody waits for those past a limit.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from engine.compilers import Compilers
from engine.errors import GrammarError, GrammarQueueFull
from engine.ipc import AddRequest
from engine.json_schemas import UnsupportedSchema, narrowed_schema
from wire.sampling import StructuredOutput

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

NUM_KEPT = 64
MAX_WAITING = 64
"""Grammars that wait for one of these threads; what comes on top of them is refused."""
COMPILE_LIMIT_S = 30.0
"""A request whose structure is not compiled by then is refused."""


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled one. A sequence carries its own along: it may be kept no more when the sequence starts."""

    compiled: "CompiledGrammar"


class Matcher:
    """How far one sequence has come in its grammar. Not thread-safe."""

    def __init__(self, grammar: Grammar) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar.compiled)
        self._num_words = -(-grammar.compiled.tokenizer_info.vocab_size // 32)

    def accept(self, token_ids: Iterable[int]) -> bool:
        """Go on by these tokens; False, and stay before the first one that the grammar does not allow."""
        return all(self._matcher.accept_token(token_id) for token_id in token_ids)

    def masks(self, token_ids: Iterable[int]) -> list[torch.Tensor | None]:
        """int32 [vocab / 32] of what may come next: now, and behind each of `token_ids`; the state stays.

        None: anything, because the grammar has ended, or because a token before is not allowed anyway.
        """
        masks, num_accepted, is_allowed = [self._mask()], 0, True
        for token_id in token_ids:
            is_allowed = is_allowed and self._matcher.accept_token(token_id)
            num_accepted += is_allowed
            masks.append(self._mask() if is_allowed else None)
        if num_accepted:
            self._matcher.rollback(num_accepted)
        return masks

    def _mask(self) -> torch.Tensor | None:
        if self._matcher.is_terminated():
            return None
        bitmask = torch.full((1, self._num_words), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(bitmask)
        return bitmask[0]


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, bitmask)


class Grammars:
    """The grammars of one model's tokenizer, the last `NUM_KEPT` of them kept."""

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        stop_token_ids: Iterable[int],
        on_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        """`vocab_size`: of the model's logits. `on_compiled` is called by a compiling thread."""
        self._make_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = list(stop_token_ids)
        self._on_compiled = on_compiled
        self._compilers: Compilers[Grammar] = Compilers()
        self._kept: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._compiler: GrammarCompiler | None = None
        self._lock = Lock()
        """Held while the compiler is made."""

    def compile(self, structured: StructuredOutput) -> Future[Grammar]:
        """Its exception: `GrammarError` for a structure that cannot be obeyed, or `GrammarQueueFull`."""
        future = self._kept.get(structured)
        if future is None:
            if self._compilers.num_waiting >= MAX_WAITING:
                return _failed(GrammarQueueFull(f"{MAX_WAITING} other structures wait to be compiled"))
            future = self._kept[structured] = self._compilers.submit(partial(self._compile, structured))
            future.add_done_callback(lambda _: self._on_compiled())
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(structured)
        return future

    def give_up(self, structured: StructuredOutput, grammar: Future[Grammar]) -> None:
        """Nobody waits for it any more. One that a thread has begun is kept: who asks again can join."""
        if self._compilers.give_up(grammar) and self._kept.get(structured) is grammar:
            del self._kept[structured]

    def close(self) -> None:
        self._compilers.close()

    def _compile(self, structured: StructuredOutput) -> Grammar:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
        try:
            return Grammar(_compile(self._compiler, structured))
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"structured output ({structured.kind}): {_first_line(error)}") from None

    def _make_compiler(self) -> "GrammarCompiler":
        from xgrammar import GrammarCompiler

        info = tokenizer_info(self._make_tokenizer(), self._vocab_size, self._stop_token_ids)
        return GrammarCompiler(info, max_threads=1, cache_enabled=False)


@dataclass(frozen=True, slots=True)
class _Held:
    request: AddRequest
    grammar: Future[Grammar]
    deadline_s: float


class GrammarAdmission:
    """Requests with a structure, held back until it is compiled, so that no step waits for it."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._held: list[_Held] = []

    def hold(self, request: AddRequest, now_s: float) -> None:
        structured = request.sampling.structured
        assert structured is not None
        if self._grammars is None:
            future = _failed(GrammarError("this engine was built without grammars"))
        else:
            future = self._grammars.compile(structured)
        self._held.append(_Held(request, future, now_s + COMPILE_LIMIT_S))

    def drop(self, request_id: str) -> None:
        self._let_go([held for held in self._held if held.request.request_id == request_id])

    def ready(self, now_s: float) -> list[tuple[AddRequest, Grammar | Exception]]:
        """Requests that may start with this grammar, or must be refused for the reason given; each once."""
        if not self._held:
            return []
        over = [held for held in self._held if held.grammar.done() or held.deadline_s <= now_s]
        results = [(held.request, _result_of(held.grammar)) for held in over]
        self._let_go(over)
        return results

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _let_go(self, gone: list[_Held]) -> None:
        """A grammar goes with the last request that waits for it."""
        self._held = [held for held in self._held if held not in gone]
        wanted = {id(held.grammar) for held in self._held}
        for held in gone:
            if self._grammars is not None and id(held.grammar) not in wanted:
                assert held.request.sampling.structured is not None
                self._grammars.give_up(held.request.sampling.structured, held.grammar)


def _failed(error: Exception) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    future.set_exception(error)
    return future


def _result_of(future: Future[Grammar]) -> Grammar | Exception:
    if not future.done():
        return GrammarError(f"the structure takes more than {COMPILE_LIMIT_S:g} s to compile; simplify it")
    error = future.exception()
    assert error is None or isinstance(error, Exception)
    return error or future.result()


def _compile(compiler: "GrammarCompiler", structured: StructuredOutput) -> "CompiledGrammar":
    value = structured.value
    match structured.kind:
        case "json_schema":
            return compiler.compile_json_schema(narrowed_schema(value))
        case "json_object":
            return compiler.compile_json_schema('{"type": "object"}', strict_mode=False)
        case "regex":
            return compiler.compile_regex(value)
        case "choice":
            return compiler.compile_grammar(choice_grammar(value))
        case "ebnf":
            return compiler.compile_grammar(value)


def choice_grammar(value: str) -> str:
    """EBNF of one of the texts in a JSON list."""
    try:
        choices = json.loads(value)
    except ValueError as error:
        raise UnsupportedSchema(f"the choices are not JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise UnsupportedSchema(
            f"the choices must be a JSON list of texts that are not empty, got {value[:80]}"
        )
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)


def tokenizer_info(tokenizer: Tokenizer, vocab_size: int, stop_token_ids: list[int]) -> "TokenizerInfo":
    """The vocabulary as xgrammar sees it. Special tokens stand for no text, so no grammar allows them."""
    from xgrammar import TokenizerInfo

    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocabulary = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in special:
            vocabulary[token_id] = token
    kind = TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
    return TokenizerInfo(
        vocabulary,
        kind["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=stop_token_ids,
        add_prefix_space=kind["add_prefix_space"],
    )


def _first_line(error: Exception) -> str:
    """Without the place in the library's source that it begins with."""
    line = (str(error).splitlines() or ["invalid"])[0]
    return line.split(".cc:")[-1].partition(": ")[2] if ".cc:" in line else line
