"""Fetches a model from the Hugging Face Hub into a folder; what is there already is not fetched again.

Only what Tandem reads: many repositories have the same weights in several formats or quantisations.
"""

import os
import signal
import sys

if os.getpid() == 1:  # has no default action for SIGTERM; imports take seconds
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
from huggingface_hub import snapshot_download

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
