import shutil
import subprocess
import sys

from proxy.native import loading

WITHOUT = """
import sys
sys.modules["proxy.native._plain_streams"] = None
import proxy.main
from proxy.detokenizer import Vocabulary
from proxy.native import loading
from proxy.token_link import TokenLink
assert not loading.IS_COMPILED and "not built" in loading.REASON
TokenLink(b"", lambda leaves_in_s: None)
"""


def test_the_path_of_plain_streams_is_compiled_where_there_is_a_compiler() -> None:
    assert loading.IS_COMPILED or shutil.which("g++") is None, loading.REASON


def test_a_proxy_without_anything_compiled_starts_all_the_same() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=60)
