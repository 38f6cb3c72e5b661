"""The images have what their processes import."""

import re
import subprocess
import sys
import tomllib

import yaml

from tests.k8s.chart import CHART
from tests.k8s.tools import REPOSITORY

WITHOUT_TORCH = """
import sys
for name in ("torch", "xgrammar", "nixl_cu12", "transformers", "zmq", "safetensors", "rich"):
    sys.modules[name] = None
import proxy.main
from proxy.settings import ProxySettings
print(proxy.main._load_text_model(ProxySettings()).name)
"""


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", line)[0] for line in requirements if line and not line.startswith("#")}  # type: ignore[index]


def test_the_proxys_requirements_are_some_of_the_packages_own() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = names((REPOSITORY / "docker" / "proxy-requirements.txt").read_text().splitlines())
    known = names(project["dependencies"]) | names(project["optional-dependencies"]["kubernetes"])
    assert wanted <= known
    assert known - wanted == {"torch", "safetensors", "pyzmq", "rich", "xgrammar"}


def test_builds_without_isolation_have_what_the_build_needs() -> None:
    wanted = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    dockerfile = (REPOSITORY / "docker" / "proxy.Dockerfile").read_text()
    assert wanted
    assert all(f"'{requirement}'" in dockerfile for requirement in wanted)
    assert set(wanted) <= set(engine_requirements())


def engine_requirements() -> list[str]:
    script = REPOSITORY / "docker" / "engine-requirements.py"
    command = [sys.executable, str(script)]
    return subprocess.run(
        command, cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_the_engines_image_has_every_requirement_and_both_extras() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["nixl"], *extras["transformers"]]
    assert engine_requirements()[: len(wanted)] == wanted


def test_the_proxy_starts_without_what_its_image_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "smollm2-135m-instruct\n", done.stderr


def test_the_images_are_tried_with_the_demos_settings_and_limits() -> None:
    script = (REPOSITORY / "docker" / "try.sh").read_text()
    values = yaml.safe_load((CHART / "values-cpu-demo.yaml").read_text())
    for role in ("proxy", "prompt", "completion"):
        limits = values[role]["resources"]["limits"]
        cpus, mebibytes = float(limits["cpu"][:-1]) / 1000, limits["memory"][:-2]
        assert f"--cpus {cpus:g} --memory {mebibytes}m --memory-swap {mebibytes}m" in script
    assert values["prompt"]["settings"] == values["completion"]["settings"]
    settings = values["prompt"]["settings"].items()
    assert " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings) in script
