"""Requests through a pair on two hosts, each disturbed at one stage of its hand-over.

The model is small and random, its prompts are long and its chunks short: so a prefill takes about a second,
the KV of a whole prompt longer still over the link, and every stage can be met from outside.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.engine.builders import save_tiny_model
from tests.system.hosts import PROXY_URL, StackOnHosts
from tests.system.processes import ServiceProcess, eventually

NUM_PROMPT_TOKENS, NUM_TOKENS = 1000, 60
CLEAR_GAP = 0.001
"""Between the likeliest and the next token, in logits. Sums in other batches round differently: where the two
are closer, either may come."""
BLOCK_SIZE, CHUNK = 16, 16
NUM_PROMPT_BLOCKS, NUM_COMPLETION_BLOCKS = 224, 136
"""Room for three prompts, and for two of which one is answered at length."""
LEASE_S = 3.0
RATE = "40mbit"
REQUEST_LIMIT_S = 60.0
AGAIN_LIMIT_S = 60.0
STOP_S = 4.0
SHAPE = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
KV_BYTES_PER_TOKEN = 2 * 2 * 8 * 64 * 4
SHARED = (
    *("--dtype", "fp32", "--num-threads", "1", "--verify-kv"),
    *("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: with its text, or with the code of an error."""

    text: str
    error: str | None
    took_s: float


@dataclass(slots=True)
class Stream:
    """A request under way."""

    expected: list[str]
    """As far as it is clear."""
    num_tokens: int
    result: "Future[Outcome]" = field(init=False)
    num_chunks: int = 0


class TinyOracle:
    """The checkpoint that all engines serve, and what it answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = save_tiny_model(path, "Llama", **SHAPE)
        self.model.generation_config.eos_token_id = None  # requests ignore it, too: one like the others
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(path / "tokenizer.json"))

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[str]:
        """Up to the first token that is not clear."""
        with torch.inference_mode():
            ids = torch.tensor([list(prompt)])
            settings = transformers.GenerationConfig(
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            answer = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        best = torch.cat(answer.scores).topk(2).values
        is_clear = (best[:, 0] - best[:, 1] >= CLEAR_GAP).tolist()
        num_clear = is_clear.index(False) if False in is_clear else num_tokens
        return [f"w{token}" for token in answer.sequences[0, len(prompt) :].tolist()[:num_clear]]


class Disturbed:
    """A pair on two hosts, the requests sent to it and the stage of the last one."""

    def __init__(self, stack: StackOnHosts, oracle: TinyOracle, senders: ThreadPoolExecutor) -> None:
        self.stack = stack
        self._oracle = oracle
        self._senders = senders
        self._chance = random.Random(5)

    @property
    def prompt(self) -> ServiceProcess:
        return self.stack.services["prompt"]

    @property
    def completion(self) -> ServiceProcess:
        return self.stack.services["completion"]

    def send(self, num_prompt: int = NUM_PROMPT_TOKENS, num_tokens: int = NUM_TOKENS) -> Stream:
        prompt, expected = self._clear_prompt(num_prompt, min(num_tokens, NUM_TOKENS))
        stream = Stream(expected, num_tokens)
        stream.result = self._senders.submit(self._follow, stream, prompt, num_tokens)
        return stream

    def _clear_prompt(self, num_prompt: int, num_clear: int) -> tuple[list[int], list[str]]:
        """One with an answer that is clear for so long."""
        while True:
            prompt = [self._chance.randrange(3, 512) for _ in range(num_prompt)]
            expected = self._oracle.answer(prompt, num_clear)
            if len(expected) == num_clear:
                return prompt, expected

    def _follow(self, stream: Stream, prompt: list[int], num_tokens: int) -> Outcome:
        began_s = time.monotonic()
        body = {
            "model": self._oracle.path.name,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"x-request-timeout-s": str(REQUEST_LIMIT_S)}
        texts: list[str] = []
        error = None
        with httpx.stream(
            "POST", PROXY_URL + "/v1/completions", json=body, headers=headers, timeout=REQUEST_LIMIT_S + 5
        ) as answer:
            if answer.status_code != 200:
                error = f"{answer.status_code} {json.loads(answer.read())['error']['code']}"
            else:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            error = str(event["error"]["code"])
                        texts += [choice["text"] for choice in event.get("choices", ())]
                        stream.num_chunks += 1
        return Outcome("".join(texts), error, time.monotonic() - began_s)

    def end(self, stream: Stream) -> Outcome:
        """In time, with the right tokens or with an error and no wrong one."""
        outcome = stream.result.result(REQUEST_LIMIT_S + 10)
        assert outcome.took_s < REQUEST_LIMIT_S + 5
        words = outcome.text.split()
        num_compared = min(len(words), len(stream.expected))
        assert words[:num_compared] == stream.expected[:num_compared]
        assert len(words) == stream.num_tokens or outcome.error is not None
        return outcome

    def until_it_works_again(self) -> None:
        """A request is served, and every block of either pool is free."""
        until_s = time.monotonic() + AGAIN_LIMIT_S
        while (outcome := self.end(self.send(64, 4))).error is not None:
            assert time.monotonic() < until_s, outcome
            time.sleep(0.1)
        eventually(self.stack.nothing_is_held, "nothing is held", 30)


def kv_bytes(num_blocks: int) -> tuple[str, str]:
    return "--kv-bytes", str(num_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN)


@contextmanager
def disturbed(
    path: Path,
    *,
    completion: Sequence[str] = (),
    another: Sequence[str] | None = None,
    lease_s: float = LEASE_S,
    transport: str = "zmq",
) -> Iterator[Disturbed]:
    oracle = TinyOracle(path)
    stack = StackOnHosts(
        path,
        (*SHARED, "--lease-s", str(lease_s)),
        rate=RATE,
        prompt=kv_bytes(NUM_PROMPT_BLOCKS),
        completion=(*kv_bytes(NUM_COMPLETION_BLOCKS), *completion),
        another=None if another is None else (*kv_bytes(NUM_COMPLETION_BLOCKS), *another),
        transport=transport,
    )
    with stack, ThreadPoolExecutor(8) as senders:
        pair = Disturbed(stack, oracle, senders)
        pair.until_it_works_again()
        yield pair


# Stages: each sends a request and returns when it is there.


def waiting(pair: Disturbed) -> Stream:
    """Behind another prompt at P; D has asked for the hand-over."""
    before = pair.prompt.metric("tandem_engine_prompt_tokens_total")
    pair.send(num_tokens=1)
    eventually(
        lambda: pair.prompt.metric("tandem_engine_prompt_tokens_total") > before, "the plug is computed"
    )
    stream = pair.send()
    eventually(
        lambda: pair.prompt.metric("tandem_engine_waiting_sequences") > 0 or stream.num_chunks > 0, "it waits"
    )
    return stream


def announced(pair: Disturbed) -> Stream:
    """P computes the prompt, D reads what is computed."""
    before = pair.prompt.metric("tandem_engine_prompt_tokens_total")
    stream = pair.send()
    eventually(
        lambda: pair.prompt.metric("tandem_engine_prompt_tokens_total") > before + NUM_PROMPT_TOKENS / 4,
        "a part is computed",
    )
    return stream


def pulling(pair: Disturbed) -> Stream:
    """The first token is out, D still reads."""
    return _after_chunks(pair, 1)


def decoding(pair: Disturbed) -> Stream:
    return _after_chunks(pair, 8)


def _after_chunks(pair: Disturbed, num_chunks: int) -> Stream:
    stream = pair.send()
    eventually(
        lambda: stream.num_chunks >= num_chunks or stream.result.done(),
        f"{num_chunks} chunks or an end",
        REQUEST_LIMIT_S + 5,
    )
    return stream


STAGES: dict[str, Callable[[Disturbed], Stream]] = {
    "waiting": waiting,
    "announced": announced,
    "pulling": pulling,
    "decoding": decoding,
}

# Faults: each returns when it is over, as far as it goes over by itself.


def kill_engine(pair: Disturbed, name: str) -> None:
    os.kill(pair.stack.services[name].engine_process().pid, signal.SIGKILL)


def stop_engine(pair: Disturbed, name: str) -> None:
    """For longer than a lease, and goes on."""
    process = pair.stack.services[name].engine_process()
    process.send_signal(signal.SIGSTOP)
    time.sleep(STOP_S)
    process.send_signal(signal.SIGCONT)


def stop_engine_for_good(pair: Disturbed, name: str) -> None:
    os.kill(pair.stack.services[name].engine_process().pid, signal.SIGSTOP)


def restart_service(pair: Disturbed, name: str) -> None:
    pair.stack.restart(name)


FAULTS: dict[str, Callable[[Disturbed, str], None]] = {
    "kill -9": kill_engine,
    "stop and go on": stop_engine,
    "stop": stop_engine_for_good,
    "restart": restart_service,
}


def cut(pair: Disturbed, seconds: float) -> None:
    pair.stack.hosts.cut()
    time.sleep(seconds)
    pair.stack.hosts.join()
