"""Random damage: with checksums all of it is found; without them nothing but our own errors comes out.

--corruptions 10400 --mangled 3000 for the full numbers of the specification.
"""

import json
import random
import resource
import shutil
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import folder_bytes, one
from saved_forms_helpers import FORMS, wrong

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError, ShardedObject, ShardedTensor, retention, tools


def values(fill):
    generator = torch.Generator().manual_seed(fill)
    return {
        "large": torch.randn(80_000, generator=generator),
        "wide": torch.randn(50, 60, generator=generator),
        **{f"small.{i}": torch.randn(7 + i, generator=generator).to(torch.bfloat16) for i in range(12)},
    }


def request_for(kind):
    """The same tensors whole, or a column and a flattened range: each takes another way through the reader."""
    asked = {key: one(key, torch.zeros_like(tensor)) for key, tensor in values(0).items()}
    if kind == "cut":
        asked["wide"] = ShardedTensor("wide", torch.zeros(50, 7), torch.float32, (50, 7), (50, 60), (0, 9), None)
        part = slice(11, 70_000)
        asked["large"] = ShardedTensor(
            "large", torch.zeros(69_989), torch.float32, (80_000,), (80_000,), (0,), None, flattened_range=part
        )
    return {**asked, "o": ShardedObject("o", None, (1,), (0,))}


def flip(data, rng):
    position = rng.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


def garble(data, rng):
    start = rng.randrange(len(data))
    length = rng.randint(1, min(64, len(data) - start))
    return data[:start] + rng.randbytes(length) + data[start + length :]


def zero(data, rng):
    page = rng.choice([512, 4096])
    start = rng.randrange(0, len(data), page)
    return data[:start] + bytes(len(data[start : start + page])) + data[start + page :]


def move(data, rng):
    """Two runs change places: sums and counts of bytes stay as they are."""
    length = rng.randint(1, max(1, len(data) // 8))
    a, b = sorted(rng.sample(range(len(data) - length + 1), 2)) if len(data) > length else (0, 0)
    if b < a + length:
        return flip(data, rng)
    return data[:a] + data[b : b + length] + data[a + length : b] + data[a : a + length] + data[b + length :]


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def extend(data, rng):
    return data + rng.randbytes(rng.randint(1, 100))


DAMAGES = (flip, flip, garble, zero, move, cut, extend)


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.slow
def test_every_random_damage_of_a_checkpoint_is_found(tmp_path, compress, corruptions):
    if compress is not None:
        pytest.importorskip("zstandard", reason="needs the module zstandard (extra zstd)")
    for fill in (1, 2):
        state = {key: one(key, tensor) for key, tensor in values(fill).items()}
        dist_ckpt.save(
            {**state, "o": ShardedObject("o", {"fill": fill}, (1,), (0,)), "it": 5},
            tmp_path / str(fill),
            compress=compress,
        )
    folder, other = tmp_path / "1", folder_bytes(tmp_path / "2")
    intact, rng, found = folder_bytes(folder), random.Random(corruptions), 0
    names = sorted(intact)
    asked = [request_for("whole"), request_for("cut")]
    for _ in range(corruptions):
        name = rng.choice([*names, "__0_0.distcp", "__0_0.distcp"])
        damage = rng.choice(DAMAGES)
        data = other[name] if rng.random() < 0.05 else damage(intact[name], rng)
        if data == intact[name]:
            continue
        (folder / name).write_bytes(data)
        with pytest.raises(CorruptError):
            dist_ckpt.load(
                rng.choice(asked), folder, validate_access_integrity=False, verify=rng.choice(["touched", "full"])
            )
        (folder / name).write_bytes(intact[name])
        found += 1
    loaded = dist_ckpt.load(asked[0], folder)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in values(1).items()) and loaded["o"] == {"fill": 1}
    print(f"{found} of {found} random damages found")
    assert found > 0.9 * corruptions


def lose(folder, name, intact, other, rng):
    (folder / name).unlink()


def empty(folder, name, intact, other, rng):
    (folder / name).write_bytes(b"")


def take_from_other_save(folder, name, intact, other, rng):
    """Some of the files that differ are those of another save of the same names; one at least is not."""
    unlike = [one for one in intact if other.get(one, intact[one]) != intact[one]]
    for taken in rng.sample(unlike, rng.randrange(1, len(unlike))):
        (folder / taken).write_bytes(other[taken])


def change_places(folder, name, intact, other, rng):
    partner = rng.choice([one for one in intact if one != name])
    (folder / name).write_bytes(intact[partner])
    (folder / partner).write_bytes(intact[name])


def rename(folder, name, intact, other, rng):
    (folder / name).rename(folder / f"{name}.old")


OF_FILES = (lose, empty, take_from_other_save, change_places, rename)


def do_damage(folder, intact, other, rng):
    """One random damage; what it was, or None if every byte is what it was."""
    data_files = [name for name in intact if name.endswith(".distcp")]
    name, damage = rng.choice([*intact, *data_files]), rng.choice([*DAMAGES, *OF_FILES])
    if damage in OF_FILES:
        damage(folder, name, intact, other, rng)
    else:
        (folder / name).write_bytes(damage(intact[name], rng))
    return None if folder_bytes(folder) == intact else f"{damage.__name__} of {name}"


def mend(folder, intact):
    for name, data in folder_bytes(folder).items():
        if data != intact.get(name):
            (folder / name).unlink()
    for name, data in intact.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(data)


def save_on_ranks(rank, ranks, form, folder, fill):
    FORMS[form].save(folder, fill)


def saved(form, root):
    """Two saves of one form with other values: their folders, and what the readers of parts find in them."""
    folders = [retention.step_path(root / str(fill), 7) for fill in (1, 2)]
    for fill, folder in enumerate(folders, 1):
        if FORMS[form].ranks > 1:
            run_ranks(save_on_ranks, FORMS[form].ranks, form, folder, fill)
        else:
            FORMS[form].save(folder, fill)
        assert wrong(FORMS[form].load(folder), FORMS[form].expected(fill)) == []
    return folders, [{name: read() for name, read in readers_of(folder).items()} for folder in folders]


def tried(action):
    """What it returns; None if it raises the package's error."""
    try:
        return action()
    except CheckpointError:
        return None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_every_random_damage_of_every_form_is_found_and_no_other_value_comes_back(tmp_path, form, corruptions):
    """``verify`` finds all of it, a load too, unless it reads nothing of the file: the door leaves common.pt out."""
    (folder, second), parts = saved(form, tmp_path)
    readers, expected = readers_of(folder), FORMS[form].expected(1)
    intact, other, rng = folder_bytes(folder), folder_bytes(second), random.Random(f"{form} {corruptions}")
    found, unread, unseen = 0, 0, []
    for _ in range(max(12, corruptions // len(FORMS))):
        damage = do_damage(folder, intact, other, rng)
        if damage is not None:
            found += 1
            unseen += [f"{damage}: verify finds nothing"] if tools.verify(folder)["ok"] else []
            mode = rng.choice(["touched", "full"])
            loaded = tried(lambda mode=mode: FORMS[form].load(folder, verify=mode))
            if loaded is not None:
                unread += 1
                unseen += [f"{damage}: other values"] if wrong(loaded, expected) or form != "door" else []
            name = rng.choice([*readers])
            part = tried(readers[name])
            # A reader of a part may find the whole other save, and never a mixture.
            if part is not None and all(wrong(part, whole[name]) for whole in parts):
                unseen += [f"{damage}: other values by {name}"]
        mend(folder, intact)
    assert wrong(FORMS[form].load(folder), expected) == []
    print(f"{form}: {found} random damages, {unread} in bytes that the load did not read, {len(unseen)} not found")
    assert unseen == []
    assert found >= 10


def readers_of(folder):
    """What reads a part of a checkpoint, or asks for nothing by name."""
    return {
        "load of nothing": lambda: dist_ckpt.load({}, folder, group=None),
        "load_plain_tensors": lambda: dist_ckpt.load_plain_tensors(folder),
        "load_common_state_dict": lambda: dist_ckpt.load_common_state_dict(folder),
        "load_tensors_metadata": lambda: {
            key: (record.global_shape, str(record.dtype))
            for key, record in dist_ckpt.load_tensors_metadata(folder).items()
        },
    }


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder without checksums of ours, as megatron leaves it: plain DCP, metadata.json and common.pt."""
    folder = tmp_path_factory.mktemp("foreign") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**values(3), "o/shard_0_1": [1, 2]}, checkpoint_id=str(folder))
    torch.save({"it": 5, "rng": torch.arange(4), "nested": [{"a": (1, 2.0, None)}]}, folder / "common.pt")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps({**config, "common_backend": "torch", "common_backend_version": 1})
    )
    return folder


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "metadata.json"])
def test_mangled_files_without_checksums_give_our_errors_in_bounded_time_and_memory(tmp_path, foreign, name, mangled):
    folder = tmp_path / "c"
    shutil.copytree(foreign, folder)
    intact, rng = (folder / name).read_bytes(), random.Random(name)
    asked = {key: one(key, torch.zeros_like(tensor)) for key, tensor in values(3).items()}
    before_kib, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(mangled):
        data = intact
        for _ in range(rng.choice([1, 1, 2, 8])):
            data = rng.choice(DAMAGES)(data, rng) or b"\0"
        (folder / name).write_bytes(data)
        start = time.monotonic()
        try:
            dist_ckpt.load(asked, folder, strict="ignore_all", dtype_policy="cast", validate_access_integrity=False)
        except CheckpointError:
            refused += 1
        except Warning:
            pass
        assert time.monotonic() - start < 10
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 300_000, f"the process grew by {grown_kib} KiB"
    print(f"{name}: {refused} of {mangled} refused, the others read as something else or were not touched")
