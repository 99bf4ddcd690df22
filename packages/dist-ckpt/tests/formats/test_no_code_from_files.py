"""Nothing that lies in a checkpoint's folder selects code: every file that could name some is forged here."""

import io
import json
import os
import pickle
import shutil
import sys
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, UnsafeError
from sixfold.dist_ckpt.formats.unpickle import Node
from sixfold.dist_ckpt.tools import commands as tools

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")

PROOF = "SIXFOLD_CODE_OF_A_FILE_RAN"


class Bomb:
    """Unpickled, it marks this process."""

    def __reduce__(self):
        return exec, (f"import os; os.environ[{PROOF!r}] = '1'",)


class Evaluated:
    def __reduce__(self):
        return eval, (f"__import__('os').environ.__setitem__({PROOF!r}, '1')",)


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fails if one of the bombs went off, or a module was imported that nobody here asks for."""
    monkeypatch.delenv(PROOF, raising=False)
    before = set(sys.modules)
    yield
    assert PROOF not in os.environ
    assert not {"antigravity", "this", "turtle"} & (set(sys.modules) - before)


@pytest.fixture(scope="module")
def plain_dcp(tmp_path_factory):
    """A folder of torch's own, which no digest covers."""
    folder = tmp_path_factory.mktemp("dcp") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(4.0), "step": 3}, checkpoint_id=str(folder))
    return folder


@pytest.fixture
def folder(plain_dcp, tmp_path):
    """A copy of it with the common data of megatron, to forge."""
    shutil.copytree(plain_dcp, tmp_path / "c")
    config = {"common_backend": "torch", "common_backend_version": 1}
    (tmp_path / "c" / "metadata.json").write_text(
        json.dumps(config | {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    torch.save({"it": 3}, tmp_path / "c" / "common.pt")
    return tmp_path / "c"


def load(folder):
    return dist_ckpt.load({"w": one("w", torch.zeros(4))}, folder)


def looks(folder):
    """Every public way to read a folder."""
    return (
        lambda: load(folder),
        lambda: dist_ckpt.load_plain_tensors(folder),
        lambda: dist_ckpt.load_common_state_dict(folder),
        lambda: dist_ckpt.load_sharded_metadata(folder),
        lambda: tools.inspect(folder),
        lambda: tools.diff(folder, folder),
        lambda: tools.convert(folder, folder.with_name("out"), to="torch_dist"),
        lambda: tools.verify(folder),
    )


@pytest.mark.parametrize(
    "backend", ["antigravity", "this:s", "turtle.done", "os.system", "pickle", "file::memory://x", "zarr"]
)
@pytest.mark.parametrize("which", ["sharded", "common"])
def test_a_backend_in_metadata_json_is_looked_up_and_never_imported(folder, nothing_runs, backend, which):
    config = json.loads((folder / "metadata.json").read_text())
    config |= {f"{which}_backend": backend, f"{which}_backend_version": 7}
    (folder / "metadata.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=backend):
        load(folder)
    for look in looks(folder):
        try:
            look()
        except CheckpointError:
            continue


def opcodes(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


NODE = text("torch.distributed.checkpoint.metadata") + text("Metadata") + b"\x93"
PICKLES = {
    "a function and its call": pickle.dumps(Bomb(), 4),
    "eval": pickle.dumps(Evaluated(), 4),
    "protocol 0": pickle.dumps(Bomb(), 0),
    "a module": opcodes(text("antigravity"), text("x"), b"\x93"),
    "a name behind a known one": opcodes(
        text("torch.distributed.checkpoint.metadata"), text("Metadata.__init__.__globals__"), b"\x93"
    ),
    "a name of torch": opcodes(text("torch"), text("load"), b"\x93"),
    "INST": b"(S'import antigravity'\nibuiltins\nexec\n.",
    "an extension code": opcodes(b"\x82\x01"),
    "a persistent id": opcodes(text("os.putenv"), b"Q"),
    "a buffer": b"\x80\x05\x97.",
    "state for a class": opcodes(NODE, b"N}", text("__init__"), text("x"), b"s\x86b"),
    "state for a dtype": opcodes(text("torch"), text("float32"), b"\x93N}", text("itemsize"), b"K\x01s\x86b"),
    "attributes of an object": opcodes(NODE, b")\x81N}", text("__class__"), text("torch"), text("Size"), b"\x93s\x86b"),
    "a dtype that is called": opcodes(text("torch"), text("float32"), b"\x93)R"),
    "memory": opcodes(text("torch"), text("Size"), b"\x93", b"J\xff\xff\xff\x7f\x85R"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_in_the_place_of_metadata_is_read_without_running_any_of_it(folder, nothing_runs, name):
    kept = dict(vars(Node))
    (folder / ".metadata").write_bytes(PICKLES[name])
    load_it, plain, _, listed, inspected, *_ = looks(folder)
    for look in (load_it, plain, listed, inspected):
        with pytest.raises(CheckpointError):
            look()
    assert not tools.verify(folder)["ok"]
    assert dict(vars(Node)) == kept


@pytest.mark.parametrize("name", ["a function and its call", "eval", "protocol 0"])
def test_the_bombs_of_this_file_go_off_where_a_pickle_is_simply_loaded(monkeypatch, name):
    monkeypatch.setenv(PROOF, "0")
    pickle.loads(PICKLES[name])
    assert os.environ[PROOF] == "1"


def torch_file(data_pkl, **records):
    """A file as torch.save makes them around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in {"data.pkl": data_pkl, "byteorder": b"little", "version": b"3\n", **records}.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def torchscript():
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), buffer)
    return buffer.getvalue()


FILES = {
    "a call": torch_file(pickle.dumps({"it": Bomb()}, 2)),
    "a call, protocol 4": torch_file(pickle.dumps({"it": Bomb()}, 4)),
    "a bare pickle": pickle.dumps({"it": Bomb()}, 2),
    "a dunder of a list": torch_file(b"\x80\x02]cbuiltins\ngetattr\n."),
    "torchscript": torchscript(),
    "numpy": torch_file(b"\x80\x02cnumpy._core.multiarray\n_reconstruct\n."),
}


@pytest.mark.parametrize("name", FILES)
def test_common_data_that_names_code_is_refused_and_tools_show_it_without_running_it(folder, nothing_runs, name):
    (folder / "common.pt").write_bytes(FILES[name])
    for look in (looks(folder)[0], looks(folder)[2]):
        with pytest.raises(CheckpointError):
            look()
    for look in looks(folder)[3:]:
        try:
            look()
        except CheckpointError:
            continue


@pytest.mark.parametrize("name", [name for name in FILES if name != "a bare pickle"])
@pytest.mark.parametrize("key", ["w", "step"])
@pytest.mark.slow
def test_a_frame_that_names_code_is_refused(folder, nothing_runs, name, key):
    """Tensors and objects lie in frames of the same form; ``.metadata`` is made to name the forged one."""
    content = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in content.storage_data.items():
        if index.fqn == key:
            file = folder / place.relative_path
            place.offset, place.length = file.stat().st_size, len(FILES[name])
            with file.open("ab") as data:
                data.write(FILES[name])
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    if key == "w":
        for look in looks(folder)[:2]:
            with pytest.raises(CheckpointError):
                look()
    for look in looks(folder):
        try:
            look()
        except CheckpointError:
            continue


@pytest.mark.parametrize("place", ["filecache::w", "memory://w", "simplecache::file://w", "zip://w::c.zip", "file:w"])
def test_a_file_name_in_metadata_is_never_a_url(folder, nothing_runs, place):
    content = pickle.loads((folder / ".metadata").read_bytes())
    for part in content.storage_data.values():
        part.relative_path = place
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert isinstance(caught.value, UnsafeError) == ("/" in place)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["c"]
