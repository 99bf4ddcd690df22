"""What lies beside a pair, in batches: loss masks, views, provenance, and pairs behind a URL."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import config
from range_server_helpers import RangeServer

from sixfold.blending import BlendChange, BlendedMegatronDatasetBuilder, BlendingError, GPTDataset
from sixfold.blending.numbers import kernels
from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder, StoreError, build, filter_pair


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["compiled", "numpy"])
def each_kernel(request, monkeypatch):
    monkeypatch.setattr(kernels._forced, "numpy", request.param == "numpy")
    return request.param


def write(prefix, first, documents=60):
    """A pair of ids from ``first`` on, each once, of which those that three divides do not count."""
    rng, at = np.random.default_rng(first), first
    with IndexedDatasetBuilder(f"{prefix}.bin", np.int32) as builder:
        for _ in range(documents):
            ids = np.arange(at, at := at + int(rng.integers(1, 40)))
            builder.add_document(ids, loss_mask=ids % 3 != 0)
    return at


def built(*prefixes, **fields):
    made = config(blend=([str(prefix) for prefix in prefixes], [1.0] * len(prefixes)), split="1,0,0", **fields)
    return BlendedMegatronDatasetBuilder(GPTDataset, [200, None, None], lambda: True, made).build()[0]


@pytest.mark.parametrize("fields", [{}, {"order": "megatron"}, {"packing": "best_fit"}], ids=str)
def test_a_label_counts_as_the_mask_of_its_pair_says(folder, each_kernel, fields):
    end = write("a", 1)
    write("b", end)
    data = built("a", "b", **fields)
    batch = data.get_batch(range(40))
    real = batch["labels"] != 0
    assert real.any()
    assert (batch["loss_mask"][real] == (batch["labels"][real] % 3 != 0)).all()
    assert set(batch["loss_mask"][real].tolist()) == {0.0, 1.0}


def test_a_pair_without_a_mask_counts_whole_beside_one_that_has_one(folder, each_kernel):
    end = write("a", 1)
    with IndexedDatasetBuilder("plain.bin", np.int32) as builder:
        builder.add_document(np.arange(end, end + 900))
    batch = built("a", "plain").get_batch(range(40))
    of_plain = batch["labels"] >= end
    assert of_plain.any()
    assert (batch["loss_mask"][of_plain] == 1).all()
    masked = (batch["labels"] > 0) & ~of_plain
    assert (batch["loss_mask"][masked] == (batch["labels"][masked] % 3 != 0)).all()


@pytest.mark.parametrize("fields", [{}, {"order": "megatron"}, {"packing": "best_fit"}], ids=str)
def test_batches_of_a_view_have_the_kept_documents_and_no_others(folder, each_kernel, fields):
    write("a", 1)
    Path("drop.txt").write_text("\n".join(map(str, range(0, 60, 3))))
    filter_pair("a", "view", lists=["drop.txt"])
    dropped = {int(i) for n in range(0, 60, 3) for i in IndexedDataset("a")[n]}
    kept = {int(i) for ids in IndexedDataset("view") for i in ids}
    batch = built("view", **fields).get_batch(range(200))
    seen = set(batch["tokens"].ravel().tolist()) - {0}
    assert not seen & dropped
    assert len(seen & kept) > 0.9 * len(kept)
    real = batch["labels"] != 0
    assert (batch["loss_mask"][real] == (batch["labels"][real] % 3 != 0)).all()


def test_why_ends_at_the_line_of_the_source(folder):
    for name in ("x", "y"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {i}" * 9}) + "\n\n" for i in range(30)))
    build(["x.jsonl", "y.jsonl"], "a", provenance=True)
    Path("drop.txt").write_text("0\n7\n")
    filter_pair("a", "view", lists=["drop.txt"])
    for prefix in ("a", "view"):
        data = built(prefix)
        for position in range(20):
            for piece in data.why(position).ranges:
                name, line = piece.origin
                text = json.loads(Path(name).read_text().splitlines()[line - 1])["text"]
                ids = IndexedDataset(prefix).get(piece.document, piece.offset, piece.length).tolist()
                assert bytes(i for i in ids if i < 256).decode() in text
                assert str(piece).endswith(f"from {name}:{line}")


@pytest.mark.parametrize("several", [False, True], ids=["documents", "sequences"])
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_what_a_change_takes_out_of_a_view_has_the_numbers_of_the_view(folder, packing, several):
    """The oracle: ids of the documents, read from the view itself."""
    at = 1
    with IndexedDatasetBuilder("a.bin", np.int32) as builder:
        for _ in range(30):
            for _ in range(3 if several else 1):
                builder.add_item(np.arange(at, at := at + 7))
            builder.end_document()
    Path("drop.txt").write_text("\n".join(map(str, range(0, 30, 4))))
    filter_pair("a", "view", lists=["drop.txt"])
    view = IndexedDataset("view")
    first, last = view.document_indices[5], view.document_indices[6]
    gone = {int(i) for n in range(first, last) for i in view[n]}
    fields = {"packing": packing, "max_epochs": None}
    data = built("view", changes=[BlendChange(at=50, drop={"view": [5]})], **fields)
    plain, tokens = built("view", **fields).get_batch(range(200))["tokens"], data.get_batch(range(200))["tokens"]
    assert np.isin(plain[50:], list(gone)).any()
    assert np.array_equal(tokens[:50], plain[:50])
    assert np.array_equal(tokens[50:], np.where(np.isin(plain[50:], list(gone)), 0, plain[50:]))
    again = pickle.loads(pickle.dumps(data))
    for piece in (piece for position in range(50, 100) for piece in again.why(position).ranges):
        assert piece.dropped == (piece.document == 5)
        number = piece.document if piece.sequence is None else piece.sequence
        ids = view.get(number, piece.offset, piece.length)
        assert np.array_equal(np.fromfile("a.bin", np.int32)[piece.byte_begin // 4 : piece.byte_end // 4], ids)
        assert view.document_indices[piece.document] <= number < view.document_indices[piece.document + 1]
    with pytest.raises(BlendingError, match=r"view: document 22 is dropped, and it has documents 0\.\.21"):
        built("view", changes=[BlendChange(at=50, drop={"view": [22]})], **fields)


def test_a_state_whose_drops_counted_a_view_otherwise_is_refused(folder):
    write("a", 1)
    Path("drop.txt").write_text("0\n")
    filter_pair("a", "view", lists=["drop.txt"])
    data = built("view", changes=[BlendChange(at=50, drop={"view": [5]})])
    state = data.state_dict(60)
    assert data.load_state_dict(json.loads(json.dumps(state))) == 60
    assert "drops_by" not in data.state_dict(50)["datasets"]["0"]
    del state["datasets"]["0"]["drops_by"]
    with pytest.raises(BlendingError, match='drops_by was null and is "view"'):
        data.load_state_dict(state)


@pytest.mark.parametrize("failing", [0.0, 0.05])
def test_a_pair_behind_a_url_gives_the_batches_of_the_local_one(folder, failing):
    write("a", 1)
    local = built("a")
    files = {f"a{end}": Path(f"a{end}").read_bytes() for end in (".bin", ".idx", ".mask")}
    with RangeServer(files, failing=failing) as server:
        remote = built(f"{server.url}/a")
        for begin in range(0, 80, 8):
            ours, theirs = local.get_batch(range(begin, begin + 8)), remote.get_batch(range(begin, begin + 8))
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert np.array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("fields", [{}, {"order": "megatron"}, {"packing": "best_fit"}], ids=str)
def test_a_state_goes_on_with_maps_without_and_behind_a_url(folder, fields):
    write("a", 1)
    with RangeServer({f"a{end}": Path(f"a{end}").read_bytes() for end in (".bin", ".idx", ".mask")}) as server:
        data = [built("a", **fields), built("a", mmap_bin_files=False, **fields), built(f"{server.url}/a", **fields)]
        states = [json.loads(json.dumps(each.state_dict(100))) for each in data]
        assert [[each.load_state_dict(state) for each in data] for state in states] == [[100] * 3] * 3
    mapped, *others = (state["datasets"]["0"]["ids"] for state in states)
    assert mapped is not None and others == [None, None]
    states[0]["datasets"]["0"]["ids"] = "another"
    with pytest.raises(BlendingError, match=r"datasets\.0\.ids was \"another\""):
        data[0].load_state_dict(states[0])


@pytest.mark.parametrize("fields", [{}, {"order": "megatron"}, {"packing": "best_fit"}], ids=str)
def test_find_has_every_position_that_read_a_line_and_no_other(folder, fields):
    """The oracle asks ``why`` of every position."""
    for name in ("x", "y"):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {i}" * 5}) + "\n" for i in range(20)))
        build([f"{name}.jsonl"], name, provenance=True)
    write("plain", 1)
    Path("drop.txt").write_text("3\n")
    filter_pair("x", "view", lists=["drop.txt"])
    data = built("view", "plain", "y", **fields)
    origins = [{piece.origin for piece in data.why(position).ranges} for position in range(150)]
    found = 0
    for name in ("x", "y"):
        for line in (1, 4, 9, 20):
            expected = [position for position, each in enumerate(origins) if (f"{name}.jsonl", line) in each]
            assert data.find_line(f"{name}.jsonl", line, 150) == expected
            found += len(expected)
    assert found > 12
    assert data.find_line("x.jsonl", 4, 150) == []  # the view left it out
    with pytest.raises(BlendingError, match=r"no dataset is known to come from 'z\.jsonl'"):
        data.find_line("z.jsonl", 1, 10)
    alone = built("y", **fields)
    assert alone.find_line("y.jsonl", 2, 60) == [
        n for n in range(60) if ("y.jsonl", 2) in {piece.origin for piece in alone.why(n).ranges}
    ]


def test_find_line_has_no_position_from_which_on_the_document_is_dropped(folder):
    Path("y.jsonl").write_text("".join(json.dumps({"text": f"y {i}" * 5}) + "\n" for i in range(20)))
    build(["y.jsonl"], "y", provenance=True)
    write("plain", 1)
    line = ("y.jsonl", 2)
    before = built("y", "plain").find_line(*line, 200)
    data = built("y", "plain", changes=[BlendChange(at=100, drop={"y": [1]})])
    assert data.find_line(*line, 200) == [n for n in before if n < 100]
    assert len(before) > len(data.find_line(*line, 200)) > 0


def test_a_dataset_behind_a_url_that_left_the_blend_is_read_while_it_is_there_and_not_needed_after(folder):
    write("b", write("a", 1))
    files = {f"{name}{end}": Path(f"{name}{end}").read_bytes() for name in "ab" for end in (".bin", ".idx", ".mask")}
    with RangeServer(files) as server:
        a, b = f"{server.url}/a", f"{server.url}/b"
        changes = [BlendChange(40, blend=([b], [1.0]))]
        there = built(a, b, changes=changes)
        tokens = there.get_batch(range(80))["tokens"]
        assert np.isin(tokens[:40], IndexedDataset("a").tokens).any()
        state = there.state_dict(60)
        del server.files["a.idx"]
        # It has not been deleted: one file of it is lost.
        with pytest.raises(BlendingError, match=r"a\.idx or \S+a\.bin is missing"):
            built(a, b, changes=changes)
        for end in (".bin", ".mask"):
            del server.files[f"a{end}"]
        with pytest.warns(UserWarning, match="has left the blend and its files are missing"):
            gone = built(a, b, changes=changes)
        assert np.array_equal(gone.get_batch(range(60, 80))["tokens"], tokens[60:])
        assert gone.load_state_dict(state) == 60
        server.status = 403
        with pytest.raises(StoreError, match="403"):
            built(a, b, changes=changes)
