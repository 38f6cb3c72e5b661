"""A model that cannot be served is refused at start, in one line that says why."""

import json
from pathlib import Path

import pytest
import transformers

from engine.errors import EngineStartError, ModelNotSupportedError
from engine.hf.assembly import inject
from engine.hf.cache import PagedLayer
from engine.model_runner import load_model_runner
from model_files import ModelFilesError, resolve_model
from tests.engine.builders import save_tiny_model
from tests.engine.hf_families import FAMILIES
from tests.engine.tensor_parallel.engines import Engine, tiny_checkpoint


def refusal(path: Path) -> str:
    with pytest.raises(ModelNotSupportedError) as caught:
        inject(resolve_model(str(path)), "fp32", 4)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path.name}: ")
    return text


def test_an_architecture_that_transformers_does_not_have(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MadeUpForCausalLM"]}))
    assert "MadeUpForCausalLM cannot be served: transformers 5." in refusal(tmp_path)
    assert "has no such model" in refusal(tmp_path)


def test_a_model_without_attention(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=128, hidden_size=48, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    assert "MambaForCausalLM cannot be served: none of its layers attends" in refusal(tmp_path)


def test_layers_whose_cache_has_a_form_of_its_own(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama4", num_local_experts=2, layer_types=["chunked_attention"] * 3)
    assert "layers of type chunked_attention keep a cache of their own form" in refusal(tmp_path)


def test_a_cache_that_does_not_hold_what_the_model_relies_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options = FAMILIES["qwen3_moe"]
    save_tiny_model(tmp_path, family, **options)
    update = PagedLayer.update
    monkeypatch.setattr(
        PagedLayer, "update", lambda self, k, v, *args, **kw: update(self, k, v * 0.9, *args, **kw)
    )
    assert "its logits differ by" in refusal(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    family, options = FAMILIES["lfm2"]
    model = save_tiny_model(tmp_path, family, **options)
    tensors = model.state_dict()
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(
        ModelFilesError, match=r"such as model\.layers\.1\.self_attn\.q_proj\.weight are missing"
    ):
        inject(resolve_model(str(tmp_path)), "fp32", 4)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = FAMILIES["lfm2"]
    save_tiny_model(tmp_path, family, **options)
    monkeypatch.setattr("engine.model_runner.find_spec", lambda name: None)
    with pytest.raises(ModelNotSupportedError, match=r"tandem-serve\[transformers\]"):
        load_model_runner(resolve_model(str(tmp_path)), kv_bytes=1 << 24)


def test_drafts_for_a_model_with_states_name_the_option(tmp_path: Path) -> None:
    family, options = FAMILIES["lfm2"]
    target = tiny_checkpoint(tmp_path / "states", family, **options)
    with pytest.raises(EngineStartError, match=r"--speculative ngram: .* start with --speculative off"):
        Engine(target, speculative="ngram", transport="zmq", role="completion")
    plain = tiny_checkpoint(tmp_path / "plain", "Llama")
    with pytest.raises(EngineStartError, match=r"--draft-model .*states keeps a state per sequence"):
        Engine(plain, speculative="model", draft_model=str(target))
