"""Fetches a model from the Hugging Face Hub into a folder; what is there already is not fetched again.

Only what Tandem reads: many repositories have the same weights in several formats or quantisations.
"""

import os
import sys

from processes.first_process import end_when_told

end_when_told()
from huggingface_hub import snapshot_download  # noqa: E402

folder, file = os.environ["FOLDER"], os.environ["FILE"]
texts = ["*.json", "*.jinja"]
if file:
    only, never = [file], []
elif os.environ["WITHOUT_WEIGHTS"]:
    only, never = texts, ["*/*"]
else:
    only, never = [*texts, "*.safetensors"], ["*/*", "consolidated*"]
snapshot_download(
    os.environ["REPOSITORY"],
    revision=os.environ["REVISION"],
    local_dir=folder,
    allow_patterns=only,
    ignore_patterns=never,
)
wanted = os.path.join(folder, file or "config.json")
if not os.path.isfile(wanted):
    sys.exit(f"{os.environ['REPOSITORY']} has no {file or 'config.json'}")
print("the model is in", folder)
