"""The same tests without the extension: as where the package was installed without a compiler.

nox -s "isolation(blending)" does so with a bounded set; by hand: pytest packages/blending/tests --without-extension
"""

import sys

import pytest

OPTION = "--without-extension"


def pytest_addoption(parser):
    parser.addoption(OPTION, action="store_true", help="hide blending's compiled kernels from the tests")


def pytest_configure(config):
    if config.getoption(OPTION, False):  # where this file is not loaded first, its options do not exist
        sys.modules["sixfold.blending._native"] = None  # an import of it is an ImportError now


def pytest_generate_tests(metafunc):
    """A test with the argument ``level`` runs at every level that this machine has, numpy's too."""
    if "level" in metafunc.fixturenames:
        from sixfold.blending.native import levels

        metafunc.parametrize("level", levels(), ids=lambda level: level.name, indirect=True)


@pytest.fixture
def level(request):
    from sixfold.blending.native import forced

    with forced(request.param):
        yield request.param
