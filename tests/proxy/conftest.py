"""The embedded model's text side, loaded once."""

import pytest

from model_files import resolve_model
from proxy.text_model import TextModel


@pytest.fixture(scope="session")
def smollm() -> TextModel:
    return TextModel.from_files(resolve_model("smollm2-135m-instruct"))
