"""Every kernel test runs with the host driver installed."""

import pytest


@pytest.fixture(autouse=True)
def _with_host_driver(host_driver):
    yield
