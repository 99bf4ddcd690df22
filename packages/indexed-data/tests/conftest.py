"""How much the randomised tests do: little in CI, much on demand.

nox -s "tests(indexed-data)" -- --fuzz-cases 1000000 --kills 5000
"""

import pytest

CHUNKS = {"fuzz_chunk": ("--fuzz-cases", 2_000, 1_000), "kill_chunk": ("--kills", 60, 100)}  # option, default, chunk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_addoption(parser):
    for option, default, _ in CHUNKS.values():
        parser.addoption(option, type=int, default=default, help=f"of indexed-data's randomised tests ({default})")


def pytest_generate_tests(metafunc):
    """A chunk is (seed, cases); so many that no test comes near its timeout."""
    for name, (option, default, chunk) in CHUNKS.items():
        if name in metafunc.fixturenames:
            # The default again: where this file is not loaded first, its options do not exist.
            cases = metafunc.config.getoption(option, default)
            metafunc.parametrize(name, [(a, min(chunk, cases - a)) for a in range(0, cases, chunk)], ids=str)
