"""How many cases the randomised tests of dist-ckpt take (few in CI, all on demand), and the S3 server of its tests."""

import importlib.util
import tempfile
from pathlib import Path

import pytest
import s3_server

COUNTS = {"--corruptions": 100, "--mangled": 30, "--save-kills": 12}


def pytest_addoption(parser):
    for option, default in COUNTS.items():
        parser.addoption(option, type=int, default=default, help=f"of dist-ckpt's randomised tests ({default})")

    parser.addoption(
        "--fill-recycled",
        action="store_true",
        help="dist-ckpt fills memory that is given back with bytes 0xFF, in pytest's own process and in ranks",
    )


def pytest_configure(config):
    if config.getoption("--fill-recycled"):
        from sixfold.dist_ckpt.reused_memory import CHECK

        CHECK.fills = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """With ``--fill-recycled`` ranks fill too: the server that they are forked from runs the file."""
    if config.getoption("--fill-recycled"):
        here = Path(__file__).parent
        for module in {item.module for item in items if here in item.path.parents and hasattr(item, "module")}:
            module.RANKS_IMPORT = (*getattr(module, "RANKS_IMPORT", ()), str(here / "filled_ranks.py"))


@pytest.fixture
def corruptions(request):
    return request.config.getoption("--corruptions")


@pytest.fixture
def mangled(request):
    return request.config.getoption("--mangled")


@pytest.fixture
def older_saves(monkeypatch):
    """Saves of this process keep plain tensors in common data, as those of 0.2 did."""
    from sixfold.dist_ckpt.save_load import replicated_tensors

    monkeypatch.setattr(replicated_tensors, "take_out", lambda common, *_, **__: ([], common, (), {}))


@pytest.fixture(scope="session")
def s3_process():
    """One S3 server for all tests that ask for ``s3``."""
    lacking = [name for name in s3_server.REQUIRED if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"needs an S3 server and its client (extra test); not installed: {', '.join(lacking)}")
    with s3_server.started() as server:
        yield server


@pytest.fixture
def s3(s3_process, monkeypatch):
    """The server without latency, faults and counts; ``s3://`` means it, here and in processes that the test starts."""
    for name, value in s3_process.environment().items():
        monkeypatch.setenv(name, value)
    s3_process.set()
    yield s3_process
    s3_process.set()


@pytest.fixture
def shm():
    """A folder in a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tier-test-") as folder:
        yield Path(folder)
