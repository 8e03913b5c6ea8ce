"""The markers: `long` runs with --long, `gpu` where there is a CUDA device; elsewhere each skips with its reason."""

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long too")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # `pytest -n 2` on two cores: a thread per worker


@pytest.fixture(autouse=True)
def recompile_limit_as_it_was() -> Iterator[None]:
    """Under cache="rotated" the backend has Dynamo raise at its limit, from then on."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: run it with --long"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device"))
