"""How the suite is divided among pytest-xdist workers."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes follow one another in one worker from the start; others go where room is.

    Two stacks at a time would starve each other on two cores, and module fixtures are dear.
    """
    items.sort(key=lambda item: item.get_closest_marker("system") is None)
    for item in items:
        group = "system" if item.get_closest_marker("system") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
