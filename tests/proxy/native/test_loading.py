import shutil

from proxy.native import loading


def test_the_path_of_plain_streams_is_compiled_where_there_is_a_compiler() -> None:
    assert loading.IS_COMPILED or shutil.which("g++") is None, loading.REASON
