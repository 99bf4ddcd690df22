"""How many cases the randomised tests of dist-ckpt take: few in CI, all that the specification asks for on demand."""

import pytest

COUNTS = {"--corruptions": 100, "--mangled": 30}


def pytest_addoption(parser):
    for option, default in COUNTS.items():
        parser.addoption(option, type=int, default=default, help=f"of dist-ckpt's randomised tests ({default})")


@pytest.fixture
def corruptions(request):
    return request.config.getoption("--corruptions")


@pytest.fixture
def mangled(request):
    return request.config.getoption("--mangled")
