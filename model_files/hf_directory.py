"""A model in a local directory in the Hugging Face layout.

Read are config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja, and
model.safetensors or the shards that model.safetensors.index.json names.
"""

import json
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from model_files.config import ModelConfig
from model_files.errors import ModelFilesError
from model_files.fields import Fields
from model_files.fingerprint import fingerprint
from model_files.fp8 import SCALE_SUFFIX, Fp8Format, dequantise, read_fp8_format
from model_files.hf_config import read_config
from model_files.interface import Float32Array, IntegerArray
from model_files.safetensors_file import SafetensorsFile

_QUANTISATION_SUFFIXES = (SCALE_SUFFIX, "activation_scale")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class HfDirectory:
    """ModelFiles of one directory; its name is the model's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.resolve().name
        self._fields = _read_json(path / "config.json")
        self._config = read_config(self._fields, self._generation_eos())

    @cached_property
    def revision(self) -> str:
        texts = (self._path / name for name in ("config.json", "tokenizer.json"))
        return fingerprint(
            [*(_read_bytes(path) for path in texts), *(shard.sample() for shard in self._weights.shards)]
        )

    def config(self) -> ModelConfig:
        return self._config

    def source_config(self) -> Mapping[str, object]:
        return self._fields.values

    def tokenizer(self) -> Tokenizer:
        content = _read_bytes(self._path / "tokenizer.json")
        try:
            return Tokenizer.from_buffer(content)
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ModelFilesError(
                f"{self._path / 'tokenizer.json'} is no tokenizer ({error}); download it again"
            ) from None

    def chat_template(self) -> str | None:
        template = self._path / "chat_template.jinja"
        if template.is_file():
            return _read_bytes(template).decode("utf-8", errors="replace")
        stored = self._tokenizer_config.raw("chat_template")
        if isinstance(stored, list):  # several named templates
            named = [
                Fields(self._tokenizer_config.source, entry) for entry in stored if isinstance(entry, dict)
            ]
            return next((entry.text("template") for entry in named if entry.raw("name") == "default"), None)
        return self._tokenizer_config.optional_text("chat_template")

    def special_tokens(self) -> dict[str, str]:
        tokens = {name: self._tokenizer_config.raw(name) for name in _SPECIAL_TOKENS}
        contents = {name: _token_text(token) for name, token in tokens.items()}
        return {name: text for name, text in contents.items() if text is not None}

    def weights(self) -> "HfWeights":
        return self._weights

    @cached_property
    def _weights(self) -> "HfWeights":
        return HfWeights(self._path, read_fp8_format(self._fields))

    @cached_property
    def _tokenizer_config(self) -> Fields:
        path = self._path / "tokenizer_config.json"
        return _read_json(path) if path.is_file() else Fields(path.name, {})

    def _generation_eos(self) -> tuple[int, ...] | None:
        path = self._path / "generation_config.json"
        if not path.is_file():
            return None
        fields = _read_json(path)
        return tuple(fields.integers("eos_token_id")) if "eos_token_id" in fields else None


class HfWeights:
    """Weights of all safetensors files of a directory; 8-bit ones come out dequantised."""

    def __init__(self, path: Path, fp8: Fp8Format | None = None) -> None:
        self._path = path
        self._fp8 = fp8
        self.shards = [SafetensorsFile(shard) for shard in _shard_paths(path)]
        self._shard_of = {name: shard for shard in self.shards for name in shard.names()}

    def names(self) -> Collection[str]:
        if self._fp8 is None:
            return self._shard_of.keys()
        return [name for name in self._shard_of if not name.endswith(_QUANTISATION_SUFFIXES)]

    def get_integers(self, name: str) -> IntegerArray | None:
        return self._shard_of[name].get_integers(name) if name in self._shard_of else None

    def get(self, name: str) -> Float32Array:
        if name not in self._shard_of:
            raise ModelFilesError(f"{self._path} has no tensor {name}; use a complete copy of this model")
        values = self._shard_of[name].get(name)
        scales = name + SCALE_SUFFIX
        if self._fp8 is None or scales not in self._shard_of:
            return values
        try:
            return dequantise(values, self._shard_of[scales].get(scales), self._fp8)
        except ValueError as error:
            raise ModelFilesError(f"{self._path}: tensor {name} has {error}; use an undamaged file") from None


def _shard_paths(path: Path) -> list[Path]:
    if (path / _INDEX).is_file():
        index = _read_json(path / _INDEX)
        names = sorted({str(name) for name in index.mapping("weight_map").values()})
        if any(Path(name).name != name for name in names):
            raise ModelFilesError(f"{index.source}: shards must lie beside it; use an undamaged file")
        return [path / name for name in names]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    raise ModelFilesError(f"{path} has neither {_SINGLE} nor {_INDEX}; download the safetensors weights")


def _token_text(token: object) -> str | None:
    """A special token is stored as its text or as an object that describes it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> Fields:
    try:
        values = json.loads(_read_bytes(path))
    except (ValueError, RecursionError):
        raise ModelFilesError(f"{path} is not JSON; download it again") from None
    if not isinstance(values, dict):
        raise ModelFilesError(f"{path} is not a JSON object; download it again")
    return Fields(str(path), values)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFilesError(
            f"cannot read {path}: {error.strerror}; --model needs a complete directory in Hugging Face layout"
        ) from None
