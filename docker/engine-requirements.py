"""Prints what the engine image installs before Tandem itself: dependencies, extras, build requirements."""

import tomllib

with open("pyproject.toml", "rb") as file:
    document = tomllib.load(file)
project = document["project"]
extras = project["optional-dependencies"]
wanted = [
    *project["dependencies"],
    *extras["nixl"],
    *extras["transformers"],
    *document["build-system"]["requires"],
]
print(*wanted, sep="\n")
