"""What is sent to a device, in which order: stand-ins for the streams of CUDA."""

import numpy as np
import torch
from context_helpers import cut as cut_rows
from gpt_helpers import tiny_config

from sixfold.gpt.data.host_to_device import Transfer
from sixfold.gpt.data.token_stream import TokenStream, build_datasets
from sixfold.gpt.parallel.sequence_parts import DocumentsHere, SequencePart


class Noted:
    """Streams that note what they are asked, and copy when the computation waits."""

    def __init__(self):
        self.calls, self.queued = [], []

    def pinned(self, array):
        self.calls.append("pinned")
        return array.clone()

    def place(self, source):
        self.calls.append("place")
        return torch.full_like(source, -1)

    def hold(self):
        self.calls.append("hold")

    def copy(self, target, source):
        self.calls.append("copy")
        self.queued.append((target, source))

    def mark(self):
        self.calls.append("mark")
        return len(self.queued)

    def wait(self, event):
        self.calls.append("wait")
        for target, source in self.queued[:event]:
            target.copy_(source)


def test_memory_is_taken_before_the_copies_wait_and_the_step_waits_for_them():
    streams = Noted()
    transfer = Transfer(streams)
    found = [transfer.put(np.arange(3)), transfer.put(np.ones(2))]
    assert streams.calls == ["pinned", "place"] * 2
    assert [int(t[0]) for t in found] == [-1, -1], "nothing is copied yet"
    transfer.send()
    assert streams.calls[4:] == ["hold", "copy", "copy", "mark"]
    transfer.arrive()
    transfer.arrive()
    assert streams.calls[8:] == ["wait"]
    assert [t.tolist() for t in found] == [[0, 1, 2], [1, 1]]


def test_pinned_sources_are_held_until_the_step_waits():
    held = []

    class Watched(Noted):
        def copy(self, target, source):
            held.append(torch._C._WeakTensorRef(source))

    transfer = Transfer(Watched())
    transfer.put(np.arange(3))
    transfer.send()
    assert not held[0].expired()
    transfer.arrive()
    assert held[0].expired()


def test_every_tensor_of_a_microbatch_travels_in_its_parcel(tmp_path):
    config = tiny_config(tmp_path)
    train, _ = build_datasets(config)
    streams = Noted()
    sent = TokenStream(train, config, copies=streams).microbatch(4, 2)
    assert streams.calls.count("mark") == 1
    sent.arrive()
    plain = TokenStream(train, config).microbatch(4, 2)
    assert sent.kwargs.keys() == plain.kwargs.keys()
    assert torch.equal(sent.tokens, plain.tokens)
    assert all(torch.equal(sent.kwargs[key], plain.kwargs[key]) for key in plain.kwargs)
    assert torch.equal(sent.rows.dataset, plain.rows.dataset)
    assert torch.equal(sent.rows.targets, plain.rows.targets)
    assert streams.calls.count("copy") == len(plain.kwargs) + 3


def test_ranks_of_a_row_have_its_parts_and_their_targets_add_up(tmp_path):
    config = tiny_config(tmp_path, "data.eod_mask_loss=true")
    train, _ = build_datasets(config)
    whole = TokenStream(train, config).microbatch(4, 2)
    assert len(whole.kwargs["cu_seqlens"]) > 3, "several documents"
    parts = [TokenStream(train, config, part=SequencePart(rank, 4)).microbatch(4, 2) for rank in range(4)]
    for rank, part in enumerate(parts):
        for key in ("labels", "loss_mask", "position_ids"):
            assert torch.equal(part.kwargs[key], cut_rows(whole.kwargs[key], rank, 4))
        assert torch.equal(part.tokens, cut_rows(whole.tokens, rank, 4))
        assert isinstance(part.kwargs["cu_seqlens"], DocumentsHere)
        assert torch.equal(part.rows.targets, part.kwargs["loss_mask"].double().sum(1))
        assert part.targets == part.kwargs["loss_mask"].sum()
    assert sum(part.targets for part in parts) == whole.targets < whole.tokens.numel()
    assert torch.equal(sum(part.rows.targets for part in parts), whole.rows.targets)


def test_without_a_document_mask_parts_have_no_documents(tmp_path):
    config = tiny_config(tmp_path, "data.document_mask=false")
    train, _ = build_datasets(config)
    part = TokenStream(train, config, part=SequencePart(1, 2)).microbatch(0, 2)
    assert part.kwargs.keys() == {"labels", "loss_mask"}
    assert part.tokens.shape == (2, 16)
