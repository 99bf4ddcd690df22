"""Options of gpt's large tests.

nox -s "tests(gpt)" -- --instants 400
nox -s "tests(gpt)" -- --all-meshes
nox -s "ranks(gpt)" -- --resume-matrix
nox -s "ranks(gpt)" -- --random-layouts 100
nox -s "tests(gpt)" -- --random-models 50
nox -s "ranks(gpt)" -- --memory-matrix
nox -s "ranks(gpt)" -- --compiled-ranks
nox -s "ranks(gpt)" -- --expert-layouts
nox -s "ranks(gpt)" -- --context-matrix
nox -s "ranks(gpt)" -- --same-bits-matrix
"""

import signal


def pytest_configure(config):
    # A shell that starts a command in the background has it ignore SIGINT, which these tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--instants", type=int, default=5, help="at which a run is asked to stop, spread over its calls (5)"
    )
    parser.addoption(
        "--resume-matrix", action="store_true", help="resumes at every layout, schedule and step, and between layouts"
    )
    parser.addoption(
        "--compiled-ranks", action="store_true", help="compiled layers of several ranks, each of which loads a compiler"
    )
    parser.addoption("--memory-matrix", action="store_true", help="memory of every layout beside what plan says of it")
    parser.addoption("--all-meshes", action="store_true", help="groups of every rank of every mesh of 4 and 8 ranks")
    parser.addoption("--random-layouts", type=int, default=0, help="random models at random layouts (0)")
    parser.addoption("--random-models", type=int, default=1, help="random models of each architecture, in and out (1)")
    parser.addoption("--context-matrix", action="store_true", help="attention and models cut over up to four ranks")
    parser.addoption("--same-bits-matrix", action="store_true", help="parallel.grad_sum = tree at every layout")
    parser.addoption("--expert-layouts", action="store_true", help="runs with experts at further layouts")
