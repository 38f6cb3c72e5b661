"""Fetches a model from the Hugging Face Hub into a folder; what is there already is not fetched again."""

import os

from huggingface_hub import snapshot_download

without_weights = bool(os.environ["WITHOUT_WEIGHTS"])
path = snapshot_download(
    os.environ["REPOSITORY"],
    revision=os.environ["REVISION"],
    local_dir=os.environ["FOLDER"],
    ignore_patterns=["*.safetensors", "*.bin", "*.pt", "*.gguf", "*.h5"] if without_weights else None,
)
print("the model is in", path)
