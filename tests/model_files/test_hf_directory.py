import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from model_files import ModelFiles, ModelFilesError, RopeScaling, resolve_model
from tests.engine.builders import save_tiny_model


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "Llama")
    return tmp_path


def assert_same_weights(files: ModelFiles, model: torch.nn.Module) -> None:
    weights, expected = files.weights(), model.state_dict()
    assert set(weights.names()) == expected.keys()
    for name, tensor in expected.items():
        values = weights.get(name)
        assert values.dtype == np.float32
        assert np.array_equal(values, tensor.float().numpy()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_every_float_type_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model = save_tiny_model(tmp_path, "Llama", dtype=dtype)
    assert_same_weights(resolve_model(str(tmp_path)), model)


def test_weights_in_shards_are_read_through_the_index(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "Qwen2", max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_weights(resolve_model(str(tmp_path)), model)


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("Llama", {}, {"architecture": "llama", "attention_bias": False, "qk_norm": False}),
        (
            "Llama",
            {"attention_bias": True, "mlp_bias": True},
            {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        ),
        ("Llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 7}, {"architecture": "mistral", "sliding_window": 7}),
        ("Mistral", {"sliding_window": None}, {"sliding_window": None}),
        ("Qwen2", {}, {"attention_bias": True, "attention_output_bias": False, "sliding_window": None}),
        ("Qwen3", {}, {"architecture": "qwen3", "qk_norm": True, "attention_bias": False}),
        ("Qwen3", {"attention_bias": True}, {"attention_bias": True, "attention_output_bias": True}),
    ],
)
def test_families_differ_by_flags(
    tmp_path: Path, family: str, options: dict[str, object], expected: dict[str, object]
) -> None:
    save_tiny_model(tmp_path, family, **options)
    config = resolve_model(str(tmp_path)).config()
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_sizes_of_the_configuration_are_read(llama: Path) -> None:
    config = resolve_model(str(llama)).config()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128, 48, 80)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 16)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope_theta) == (512, 1e-6, 10000.0)


def test_rotary_settings_are_read_in_both_spellings(llama: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=64)
    edit_json(llama / "config.json", rope_parameters={**scaling, "rope_theta": 5e5})
    new = resolve_model(str(llama)).config()
    edit_json(llama / "config.json", rope_parameters=None, rope_scaling=scaling, rope_theta=5e5)
    old = resolve_model(str(llama)).config()
    edit_json(llama / "config.json", rope_scaling={"type": "linear", "factor": 2})
    oldest = resolve_model(str(llama)).config()
    assert (new.rope_scaling, new.rope_theta) == (old.rope_scaling, old.rope_theta) == (expected, 5e5)
    assert oldest.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_the_generation_configuration_names_the_end_tokens(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[7, 9])
    assert resolve_model(str(llama)).config().eos_token_ids == (7, 9)
    edit_json(llama / "generation_config.json", eos_token_id=None)
    assert resolve_model(str(llama)).config().eos_token_ids == (2,)
    (llama / "generation_config.json").unlink()
    assert resolve_model(str(llama)).config().eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": []}, "architectures should name one class, not none"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": "LlamaForCausalLM"}, "architectures should be a list of texts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation 'awq' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope scaling factors must be positive"),
        ({"hidden_size": "48"}, "hidden_size should be an integer, not '48'"),
        ({"hidden_size": True}, "hidden_size should be an integer"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
        ({"num_attention_heads": 0}, "num_heads must be positive"),
        ({"num_key_value_heads": 4}, "num_heads 6 is no multiple of num_kv_heads 4"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_nobody_can_compute_is_refused_by_name(
    llama: Path, changes: dict[str, object], message: str
) -> None:
    edit_json(llama / "config.json", **changes)
    with pytest.raises(ModelFilesError, match=message):
        resolve_model(str(llama))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Lfm2ForCausalLM"]},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"use_sliding_window": True},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_the_own_forward_pass_does_not_cover_is_left_to_transformers(
    llama: Path, changes: dict[str, object]
) -> None:
    edit_json(llama / "config.json", **changes)
    files = resolve_model(str(llama))
    assert files.config().architecture == "transformers"
    assert (files.config().vocab_size, files.config().num_layers) == (128, 3)
    assert changes.items() <= files.source_config().items()


def test_sizes_of_a_model_with_an_inner_text_model_are_read_there(llama: Path) -> None:
    text = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({"architectures": ["Some"], "text_config": text}))
    config = resolve_model(str(llama)).config()
    assert (config.vocab_size, config.num_layers, config.head_dim) == (128, 3, 16)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff\xfe", "[" * 100_000])
def test_a_broken_configuration_is_refused(llama: Path, content: str) -> None:
    (llama / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelFilesError, match=r"config\.json is not (a )?JSON"):
        resolve_model(str(llama))


def test_missing_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(
        ModelFilesError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        resolve_model(str(llama)).weights()


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama", max_shard_size="40KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelFilesError, match=f"{victim.name}: No such file"):
        resolve_model(str(tmp_path)).weights()


def test_an_index_cannot_lead_out_of_the_directory(llama: Path) -> None:
    edit_json(llama / "model.safetensors.index.json", weight_map={"x": "../../secret.safetensors"})
    with pytest.raises(ModelFilesError, match="shards must lie beside it"):
        resolve_model(str(llama)).weights()


def test_a_missing_tensor_is_refused_by_name(llama: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"has no tensor model\.layers\.9"):
        resolve_model(str(llama)).weights().get("model.layers.9.mlp.up_proj.weight")


def test_the_tokenizer_is_read_and_a_missing_or_broken_one_refused(llama: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: No such file"):
        resolve_model(str(llama)).tokenizer()
    (llama / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is no tokenizer"):
        resolve_model(str(llama)).tokenizer()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(llama / "tokenizer.json"))
    assert resolve_model(str(llama)).tokenizer().encode("b a c").ids == [1, 0, 2]


def test_special_tokens_are_texts_or_objects(llama: Path) -> None:
    assert resolve_model(str(llama)).special_tokens() == {}
    edit_json(
        llama / "tokenizer_config.json",
        bos_token="<s>",
        eos_token={"content": "</s>", "lstrip": False},
        pad_token=3,
    )
    assert resolve_model(str(llama)).special_tokens() == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_chat_template_comes_from_its_file_or_the_tokenizer_configuration(llama: Path) -> None:
    assert resolve_model(str(llama)).chat_template() is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(llama / "tokenizer_config.json", chat_template=named)
    assert resolve_model(str(llama)).chat_template() == "D"
    edit_json(llama / "tokenizer_config.json", chat_template="one")
    assert resolve_model(str(llama)).chat_template() == "one"
    (llama / "chat_template.jinja").write_text("file")
    assert resolve_model(str(llama)).chat_template() == "file"


def test_the_revision_follows_the_weights(tmp_path: Path) -> None:
    revisions = []
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        model = save_tiny_model(tmp_path / name, "Llama")
        model.model.layers[0].mlp.up_proj.weight.data.mul_(factor)
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        revisions.append(resolve_model(str(tmp_path / name)).revision)
    assert revisions[0] == revisions[1] != revisions[2]
