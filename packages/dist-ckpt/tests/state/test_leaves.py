"""torch's Stateful objects anywhere in a state dict: their ``state_dict`` is saved, ``load_state_dict`` gets it."""

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import everything, same
from dist_ckpt_helpers import flip_byte, one
from torch.distributed.checkpoint.stateful import Stateful

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, MismatchError, ShardedObject, ShardedTensor, ShardingError


class Counter:
    """Has the two methods, and so is a Stateful for torch; it need not say so."""

    def __init__(self, count=0, kind="counter"):
        self.count, self.kind, self.calls = count, kind, []

    def state_dict(self):
        self.calls.append("state_dict")
        return {"count": self.count, "kind": self.kind, "history": [1, {"of": (2, 3)}]}

    def load_state_dict(self, state_dict):
        self.calls.append(state_dict)
        self.count, self.kind = state_dict["count"], state_dict["kind"]


class Part:
    """Holds a sharded tensor, an object, a common tensor and plain values."""

    def __init__(self, key, value):
        self.key, self.w, self.o = key, torch.full((4, 2), value), value
        self.scale, self.loaded = torch.tensor([value]), None

    def state_dict(self):
        return {
            "w": one(f"{self.key}.w", self.w),
            "o": ShardedObject(f"{self.key}.o", self.o, (1,), (0,)),
            "scale": self.scale,
            "nested": [{"value": float(self.w[0, 0])}],
        }

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def test_a_counter_is_a_stateful_for_torch():
    assert isinstance(Counter(), Stateful)


def test_what_a_stateful_gives_is_saved_and_what_was_saved_it_gets(tmp_path):
    saved = Counter(7, "saved")
    dist_ckpt.save({"counter": saved, "it": 3}, tmp_path / "c")
    assert saved.calls == ["state_dict"]
    other = Counter()
    loaded = dist_ckpt.load({"counter": other}, tmp_path / "c")
    assert (other.count, other.kind) == (7, "saved")
    assert other.calls[-1] == {"count": 7, "kind": "saved", "history": [1, {"of": (2, 3)}]}
    assert sum(call != "state_dict" for call in other.calls) == 1  # load_state_dict is called once
    assert loaded["counter"] is other  # the object stays where it was, as with torch
    assert loaded["it"] == 3


def test_statefuls_lie_in_lists_and_dicts_of_any_depth(tmp_path):
    def state(*counts):
        a, b, c = (Counter(count) for count in counts)
        return {"all": [a, {"deep": {1: b}}], "last": [[c]]}, (a, b, c)

    asked, _ = state(1, 2, 3)
    dist_ckpt.save(asked, tmp_path / "c")
    asked, counters = state(0, 0, 0)
    loaded = dist_ckpt.load(asked, tmp_path / "c")
    assert [counter.count for counter in counters] == [1, 2, 3]
    assert loaded["all"][1]["deep"][1] is counters[1]
    assert loaded["last"][0][0] is counters[2]


def test_sharded_tensors_and_objects_within_are_sharded_and_loaded_in_place(tmp_path):
    dist_ckpt.save({"parts": [Part("a", 1.0), Part("b", 2.0)]}, tmp_path / "c")
    assert set(dist_ckpt.load_tensors_metadata(tmp_path / "c")) == {"a.w", "b.w", "parts.0.scale", "parts.1.scale"}
    parts = [Part("a", 0.0), Part("b", 0.0)]
    dist_ckpt.load({"parts": parts}, tmp_path / "c")
    for part, value in zip(parts, (1.0, 2.0), strict=True):
        assert part.loaded["w"].data_ptr() == part.w.data_ptr()
        assert part.w.unique().tolist() == [value]
        assert part.loaded["o"] == value
        assert part.loaded["scale"].tolist() == [value]
        assert part.loaded["nested"] == [{"value": value}]


def test_another_cut_of_what_a_stateful_holds_is_loaded(tmp_path):
    class Columns(Part):
        def state_dict(self):
            halves = self.w.chunk(2, dim=1)
            cut = [
                ShardedTensor.from_rank_offsets("a.w", half.contiguous(), (1, i, 2)) for i, half in enumerate(halves)
            ]
            return {**super().state_dict(), "w": cut}

    whole = Part("a", 0.0)
    whole.w = torch.arange(8.0).view(4, 2)
    dist_ckpt.save({"part": whole}, tmp_path / "c")
    cut = Columns("a", 0.0)
    dist_ckpt.load({"part": cut}, tmp_path / "c")
    assert torch.equal(torch.cat(cut.loaded["w"], dim=1), whole.w)


def test_modules_optimizers_and_schedules_are_stateful(tmp_path):
    def trainer(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(adam, 1)
        for _ in range(seed):
            model(torch.rand(4, 3)).square().mean().backward()
            adam.step()
            schedule.step()
        return {"model": model, "rest": [adam, schedule]}

    saved, other = trainer(3), trainer(1)
    dist_ckpt.save(saved, tmp_path / "c")
    dist_ckpt.load(other, tmp_path / "c")
    for a, b in ((saved["model"], other["model"]), *zip(saved["rest"], other["rest"], strict=True)):
        assert same(b.state_dict(), a.state_dict())


def test_the_callers_dict_is_not_changed(tmp_path):
    counter = Counter(3)
    state = {"all": [counter], "it": 1}
    dist_ckpt.save(state, tmp_path / "c")
    dist_ckpt.load(state, tmp_path / "c")
    assert state == {"all": [counter], "it": 1}


def test_a_background_save_asks_for_the_state_at_the_call(tmp_path):
    part, counter = Part("a", 5.0), Counter(5)
    handle = dist_ckpt.async_save({"part": part, "counter": counter}, tmp_path / "c")
    assert counter.calls == ["state_dict"]
    part.w.zero_()
    part.scale.zero_()
    counter.count = 0
    handle.wait()
    again, count = Part("a", 0.0), Counter()
    dist_ckpt.load({"part": again, "counter": count}, tmp_path / "c")
    assert again.w.unique().tolist() == [5.0]
    assert again.loaded["scale"].tolist() == [5.0]
    assert count.count == 5


def test_a_damaged_checkpoint_reaches_no_load_state_dict(tmp_path):
    dist_ckpt.save({"part": Part("a", 1.0), "counter": Counter(1)}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.distcp")
    flip_byte(file, file.stat().st_size // 2)
    part, counter = Part("a", 0.0), Counter()
    with pytest.raises(CorruptError):
        dist_ckpt.load({"counter": counter, "part": part}, tmp_path / "c")
    assert part.loaded is None
    assert counter.count == 0


def test_a_stateful_that_the_checkpoint_knows_nothing_of_is_named(tmp_path):
    dist_ckpt.save({"counter": Counter(1)}, tmp_path / "c")
    other = Counter(9)
    with pytest.raises(MismatchError, match="other"):
        dist_ckpt.load({"counter": Counter(), "other": other}, tmp_path / "c")
    assert other.count == 9
    with pytest.raises(MismatchError, match=r"b\.w"):
        dist_ckpt.load({"counter": Part("b", 0.0)}, tmp_path / "c")


def test_errors_of_the_users_own_methods_come_out_as_they_are(tmp_path):
    class Broken(Counter):
        def state_dict(self):
            raise KeyError("no state yet")

    class Refusing(Counter):
        def load_state_dict(self, state_dict):
            raise KeyError("of another model")

    with pytest.raises((KeyError, ShardingError), match="no state yet"):
        dist_ckpt.save({"counter": Broken()}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    dist_ckpt.save({"counter": Counter(1)}, tmp_path / "c")
    with pytest.raises((KeyError, MismatchError), match="of another model"):
        dist_ckpt.load({"counter": Refusing()}, tmp_path / "c")


def test_a_value_within_that_cannot_be_kept_is_refused_by_its_path(tmp_path):
    class Odd(Counter):
        def state_dict(self):
            return {"deep": [lambda: None]}

    with pytest.raises(ShardingError, match=r"odd.*deep"):
        dist_ckpt.save({"odd": Odd()}, tmp_path / "c")


def test_torchs_reader_finds_the_tensors_of_a_stateful(tmp_path):
    dist_ckpt.save({"part": Part("a", 4.0)}, tmp_path / "c")
    found = everything(torch_dcp.FileSystemReader(tmp_path / "c"))
    assert torch.equal(found["a.w"], torch.full((4, 2), 4.0))
