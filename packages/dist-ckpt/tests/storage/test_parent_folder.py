"""A place whose parent may not be written to: the error names it, and its remedy works (as root: of another user)."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, shutil, tempfile
from sixfold import dist_ckpt

root = tempfile.mkdtemp()
try:
    os.chmod(root, 0o755)
    os.makedirs(f"{root}/runs/c")
    if os.getuid() == 0:
        os.chown(f"{root}/runs/c", 65534, 65534)
    os.chmod(f"{root}/runs", 0o555)
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            try:
                dist_ckpt.save({"a": 1}, f"{root}/runs/c", group=None)
            except dist_ckpt.StorageError as error:
                print(str(error).replace(root, "ROOT"))
            dist_ckpt.save({"a": 1}, f"{root}/runs/c/checkpoint", group=None)
            print(dist_ckpt.load({}, f"{root}/runs/c/checkpoint", group=None), flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
finally:
    os.chmod(f"{root}/runs", 0o755)
    shutil.rmtree(root)
"""


@pytest.mark.slow
def test_a_parent_that_may_not_be_written_to_is_named_and_the_remedy_works():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    told, loaded = done.stdout.splitlines()
    assert told.startswith("ROOT/runs may not be written to by this user"), done.stderr
    assert told.endswith("such as ROOT/runs/c/checkpoint")
    assert loaded == "{'a': 1}"
