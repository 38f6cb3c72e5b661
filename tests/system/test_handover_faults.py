"""What disturbed requests are compared with."""

from pathlib import Path

import torch

from tests.system.handover_faults import TinyOracle

EOS, NUM_TOKENS = 2, 3


def test_the_oracle_answers_as_requests_that_ignore_the_end_of_text_do(tmp_path: Path) -> None:
    """Where that token is the likeliest it is the answer: it was left out once, and right texts failed."""
    oracle = TinyOracle(tmp_path)
    prompt = list(range(3, 40))
    with torch.no_grad():
        (likeliest,) = oracle.answer(prompt, 1)
        head = oracle.model.get_output_embeddings().weight
        head[EOS] = 1.5 * head[int(likeliest[1:])]
    answer = oracle.answer(prompt, NUM_TOKENS)
    assert answer[0] == f"w{EOS}"
    tokens = [int(word[1:]) for word in answer]
    with torch.inference_mode():
        logits = oracle.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(dim=1).tolist() == tokens
    assert len(tokens) == NUM_TOKENS
