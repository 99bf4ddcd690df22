"""Options of pipeline's randomised tests: ``nox -s "tests(pipeline)" -- --mutants 2000``."""


def pytest_addoption(parser):
    parser.addoption("--mutants", type=int, default=24, help="of each schedule that verify is tested with (24)")
