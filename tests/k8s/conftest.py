from pathlib import Path

import pytest

from tests.k8s.tools import Tools, ToolsMissing, obtain_promtool, obtain_tools


@pytest.fixture(scope="session")
def tools() -> Tools:
    try:
        return obtain_tools()
    except ToolsMissing as error:
        pytest.skip(f"THE CHART IS NOT TESTED: {error}")


@pytest.fixture(scope="session")
def promtool() -> Path:
    try:
        return obtain_promtool()
    except ToolsMissing as error:
        pytest.skip(f"THE PROMETHEUS RULES ARE NOT TESTED: {error}")
