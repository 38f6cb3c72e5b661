"""What a cluster needs of the machine, and how loudly its absence is said."""

import shutil
import sys
import warnings

from tests.k8s.cluster.binaries import Binaries, BinariesMissing, obtain_binaries
from tests.k8s.cluster.network import why_no_namespaces
from tests.k8s.tools import Tools, ToolsMissing, obtain_tools


class ClusterImpossible(Exception):
    """The message says what is missing."""


def cluster_programs() -> tuple[Binaries, Tools]:
    """Raises `ClusterImpossible` where a cluster cannot be run."""
    for program in ("ip", "openssl", "setpriv", "unshare", "mount", "bash"):
        if shutil.which(program) is None:
            raise ClusterImpossible(f"{program} is not installed")
    if reason := why_no_namespaces():
        raise ClusterImpossible(reason)
    try:
        return obtain_binaries(), obtain_tools()
    except (BinariesMissing, ToolsMissing) as error:
        raise ClusterImpossible(str(error)) from error


def say_loudly(reason: str) -> str:
    """Past pytest's capture, so that nobody takes a skipped control plane for a tested one."""
    message = f"NO KUBERNETES CONTROL PLANE IS TESTED: {reason}"
    print(f"\n{'!' * 100}\n{message}\n{'!' * 100}", file=sys.__stderr__, flush=True)
    warnings.warn(message, stacklevel=2)
    return message
