"""A benchmark that ended early goes on where it stopped, and its report is of everything."""

from pathlib import Path

import pytest

from benchmarks.journal import Journal
from benchmarks.quality import by_set, score_formats
from model_files import resolve_model
from tests.engine.builders import save_tiny_model
from tests.engine.grammar_tokenizer import tiny_tokenizer


def test_lines_stay_in_the_file_and_are_found_by_their_values(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).add(set="a", text=0)
    Journal(path).add(set="b", text=0)
    found = Journal(path)
    assert found.lines == [{"set": "a", "text": 0}, {"set": "b", "text": 0}]
    assert found.having(set="b") == [{"set": "b", "text": 0}]


def test_a_text_that_is_in_the_journal_is_not_computed_again(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    files, path = resolve_model(str(tmp_path)), tmp_path / "journal"
    texts = {"a": ["one two", "three four five"], "b": ["six"]}
    score_formats(files, ["fp32"], {"a": texts["a"][:1]}, 8, Journal(path))
    (first,) = Journal(path).lines
    score_formats(files, ["fp32"], texts, 8, Journal(path))
    lines = Journal(path).lines
    assert lines[0] == first
    assert [(line["set"], line["text"]) for line in lines] == [("a", 0), ("a", 1), ("b", 0)]
    scores = by_set(Journal(path), "fp32", ["a", "b"])
    assert scores["all"].num_tokens == scores["a"].num_tokens + scores["b"].num_tokens
    assert scores["a"].nats == pytest.approx(lines[0]["score"]["nats"] + lines[1]["score"]["nats"])
    assert scores["all"].num_agreeing == scores["all"].num_tokens
    assert scores["all"].divergence == 0
