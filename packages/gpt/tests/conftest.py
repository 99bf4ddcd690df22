"""Options of gpt's large tests.

nox -s "tests(gpt)" -- --instants 400
"""


def pytest_addoption(parser):
    parser.addoption(
        "--instants", type=int, default=8, help="at which a run is asked to stop, spread over its calls (8)"
    )
