"""Options of the integration tests.

nox -s integration -- --all-jobs
"""


def pytest_addoption(parser):
    parser.addoption("--all-jobs", action="store_true", help="every torchrun job of test_training.py, not the first")
