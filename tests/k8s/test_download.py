"""The init container that fetches a model: what it asks the Hub for, of repositories as they are."""

import runpy
from collections.abc import Callable, Iterable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from tests.k8s.chart import CHART

SCRIPT = CHART / "files" / "download.py"
TEXTS = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
REPOSITORY = [
    *(".gitattributes", "README.md", "consolidated.safetensors", "model.safetensors.index.json"),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "pytorch_model.bin"),
    *("original/consolidated.00.pth", "original/params.json", "onnx/model.onnx", "model.pth", *TEXTS),
]
QUANTISATIONS = ["README.md", "config.json", "m-q4.gguf", "m-q8.gguf"]

Download = Callable[..., list[str]]


@pytest.fixture
def download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Download:
    """Runs the script; returns what it fetched of the files in the repository."""

    def run(repository: Iterable[str], file: str = "", without_weights: str = "") -> list[str]:
        fetched: list[str] = []

        def snapshot_download(repo_id: str, *, revision: str, local_dir: str, **patterns: list[str]) -> str:
            assert (repo_id, revision, local_dir) == ("org/model", "main", str(tmp_path))
            fetched.extend(filter_repo_objects(repository, **patterns))
            for name in fetched:
                (tmp_path / name).touch()
            return local_dir

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        given = {"REPOSITORY": "org/model", "REVISION": "main", "FOLDER": str(tmp_path)}
        for name, value in {**given, "FILE": file, "WITHOUT_WEIGHTS": without_weights}.items():
            monkeypatch.setenv(name, value)
        runpy.run_path(str(SCRIPT))
        return sorted(fetched)

    return run


def test_an_engine_fetches_the_weights_in_one_format(download: Download) -> None:
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert download(REPOSITORY) == sorted([*TEXTS, *weights, "model.safetensors.index.json"])


def test_a_proxy_fetches_no_weights(download: Download) -> None:
    assert download(REPOSITORY, without_weights="1") == sorted([*TEXTS, "model.safetensors.index.json"])


@pytest.mark.parametrize("without_weights", ["", "1"])
def test_of_many_quantisations_the_one_wanted_is_fetched(download: Download, without_weights: str) -> None:
    assert download(QUANTISATIONS, "m-q4.gguf", without_weights) == ["m-q4.gguf"]


def test_a_file_that_is_not_there_is_named(download: Download) -> None:
    with pytest.raises(SystemExit, match=r"org/model has no m-q5\.gguf"):
        download(QUANTISATIONS, "m-q5.gguf")
