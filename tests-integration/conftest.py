"""Options of the integration tests.

nox -s integration -- --all-jobs
nox -s docs     gives --whole-site
"""


def pytest_addoption(parser):
    parser.addoption("--all-jobs", action="store_true", help="every torchrun job of test_training.py, not the first")
    parser.addoption("--whole-site", action="store_true", help="every block of the site's pages, and the built site")
    parser.addoption("--site", metavar="FOLDER", help="a built site elsewhere, for the tests of its pages in a browser")
    parser.addoption("--pictures", action="store_true", help="write the pictures of the schedule explorer anew")
