"""How much the randomised tests do, little in CI and much on demand, and with which of the compiled kernels.

nox -s "tests(blending)" -- --weight-vectors 10000 --histories 500 --megatron-cases 1000 --schedules 10000
nox -s "ranks(blending)" -- --megatron-cases 1000
pytest packages/blending/tests --without-extension          # as where the package was installed without a compiler
"""

import sys
from collections import Counter

import pytest

OPTION = "--without-extension"
CHUNKS = {  # option, default, cases in one test
    "vector_chunk": ("--weight-vectors", 140, 70),
    "history_chunk": ("--histories", 4, 4),
    "megatron_chunk": ("--megatron-cases", 6, 6),
    "schedule_chunk": ("--schedules", 40, 20),
}


def pytest_addoption(parser):
    parser.addoption(OPTION, action="store_true", help="hide blending's compiled kernels from the tests")
    for option, default, _ in CHUNKS.values():
        parser.addoption(option, type=int, default=default, help=f"of blending's randomised tests ({default})")


def pytest_configure(config):
    if config.getoption(OPTION, False):  # where this file is not loaded first, its options do not exist
        sys.modules["sixfold.blending._native"] = None  # an import of it is an ImportError now


def pytest_generate_tests(metafunc):
    """A test with the argument ``level`` runs at every level that this machine has, numpy's too.

    A chunk is a range of seeds; so few that no test comes near its timeout.
    """
    if "level" in metafunc.fixturenames:
        from sixfold.blending.numbers.kernels import levels

        metafunc.parametrize("level", levels(), ids=lambda level: level.name, indirect=True)
    for name, (option, default, chunk) in CHUNKS.items():
        if name in metafunc.fixturenames:
            cases = metafunc.config.getoption(option, default)
            metafunc.parametrize(name, [range(a, min(a + chunk, cases)) for a in range(0, cases, chunk)], ids=str)


@pytest.fixture
def level(request):
    from sixfold.blending.numbers.kernels import forced

    with forced(request.param):
        yield request.param


def pytest_terminal_summary(terminalreporter):
    """One line of what the cases of all chunks came to."""
    found: dict[str, Counter[str]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, outcomes in report.user_properties if report.when == "call" else ():
            if name in CHUNKS:
                found.setdefault(name, Counter()).update(outcomes)
    for name, outcomes in found.items():
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        terminalreporter.write_line(f"{CHUNKS[name][0]}: {told}")
