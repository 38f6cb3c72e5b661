"""Through real processes, models with per-sequence states answer what transformers generates for them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.engine.hf_families import TinyForeign
from tests.system.processes import RunningStack, ServiceProcess, eventually

pytestmark = pytest.mark.system

CHUNK = 16
NUM_TOKENS = 12
NUM_SLOTS = 9
"""The null slot included: fewer than requests at once."""


@dataclass(frozen=True, slots=True)
class Served:
    tiny: TinyForeign
    stack: RunningStack


@pytest.fixture(scope="module", params=[("lfm2", "nixl"), ("qwen3_next", "zmq")], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, transport = request.param
    tiny = TinyForeign.make(tmp_path_factory.mktemp("model"), family)
    save_tokenizer(tiny.checkpoint)
    states = tiny.injected.shape.states
    assert states is not None
    settings = {
        "model": str(tiny.checkpoint),
        "dtype": "fp32",
        "transport": transport,
        "kv_bytes": 1 << 22,
        "state_bytes": NUM_SLOTS * states.row_bytes,
        "block_size": 4,
        "max_num_batched_tokens": CHUNK,
    }
    with RunningStack(**settings) as stack:
        yield Served(tiny, stack)


def save_tokenizer(path: Path) -> None:
    """One word for each id."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))


def prompts() -> list[list[int]]:
    chance = np.random.default_rng(3)
    return [
        chance.integers(3, 128, length).tolist() for length in (1, 15, 16, 17, 40, 60, 3, 33, 8, 9, 31, 50)
    ]


def complete(client: openai.OpenAI, served: Served, prompt: list[int]) -> str:
    answer = client.completions.create(
        model=served.tiny.checkpoint.name, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return answer.choices[0].text


def free_slots(service: ServiceProcess) -> tuple[int, int]:
    """Free and usable."""
    lines = httpx.get(service.url + "/metrics", timeout=5.0).text.splitlines()
    values = {
        line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("tandem_engine")
    }
    return int(values["tandem_engine_state_free_slots"]), int(values["tandem_engine_state_slots"])


def test_twelve_prompts_at_once_equal_transformers(served: Served) -> None:
    with served.stack.client() as client, ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda prompt: complete(client, served, prompt), prompts()))
    expected = [" ".join(f"w{i}" for i in served.tiny.generate(prompt, NUM_TOKENS)) for prompt in prompts()]
    assert texts == expected
    served.stack.wait_until_nothing_is_pinned()
    for service in (served.stack.prompt, served.stack.completion):
        eventually(
            lambda service=service: free_slots(service) == (NUM_SLOTS - 1, NUM_SLOTS - 1),  # type: ignore[misc]
            "all slots are free",
        )


def test_the_hello_names_the_form_of_the_state(served: Served) -> None:
    compatibility = served.stack.prompt.info()["compatibility"]
    assert isinstance(compatibility, dict)
    assert compatibility["state"] == str(served.tiny.injected.shape.states)
    assert compatibility["kv_layout"] == str(served.tiny.injected.shape.kv)
