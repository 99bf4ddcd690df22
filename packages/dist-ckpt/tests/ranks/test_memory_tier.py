"""Snapshots in memory on several ranks and domains: any layout loads them, lost and damaged copies are made up for.

Kills are in test_memory_tier_kills.py, what goes wrong while a snapshot is taken in test_memory_tier_faults.py.
"""

import itertools
import re
import shutil

import pytest
import torch.distributed as dist
from dist_ckpt_helpers import flip_byte
from memory_tier_helpers import (
    check_state,
    domain_of,
    files_below,
    generations,
    lose,
    restores,
    saves,
    state_of,
    tier_of,
    used_bytes,
)

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError, MismatchError, ShardingError, retention


def goes_on(rank, ranks, shm, domains, expected, steps):
    """A restart at another layout: what it restores, and what it saves then."""
    with tier_of(shm, rank, ranks, domains) as tier:
        found = tier.restore(state_of(rank, ranks, 0, fill=False))
        assert (found and found.step) == expected
        if found:
            check_state(found.state, rank, ranks, expected)
        for step in steps:
            assert tier.save(step, state_of(rank, ranks, step)).step == step
        tier.wait()
        assert tier.steps()[-1] == steps[-1]
    return found and found.place


@pytest.mark.slow
@pytest.mark.parametrize(("worlds", "domains"), [((4, 2, 1, 4), 1), ((4, 2, 4), 2), ((1, 4, 2), 1), ((4, 4), 4)])
def test_a_run_goes_on_at_other_numbers_of_ranks_with_the_same_bits(shm, worlds, domains):
    before = None
    for number, ranks in enumerate(worlds):
        steps = [10 * number + 1, 10 * number + 2]
        places = run_ranks(goes_on, ranks, shm, domains, before, steps)
        assert places == [None if before is None else "memory"] * ranks
        before = steps[-1]
    for domain in range(domains):
        (kept,) = generations(shm, domain)  # one generation is left, and no mirror of a load
        assert f"-step-{before:08d}-" in kept.name
        assert not [name for name in files_below(shm) if "mirror" in name or ".put-" in name]


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (4, 4)), ((4, 4), (2, 2)), ((2, 1), (4, 2))])
def test_domains_may_be_added_and_others_be_lost_for_good(shm, saved, loaded):
    """Of four domains two are left: with two copies of each part these have all."""
    run_ranks(saves, saved[0], shm, saved[1], [7], True, {"replicas": min(2, saved[1] - 1)})
    assert {found.step for found in run_ranks(restores, loaded[0], shm, loaded[1])} == {7}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "domains", "replicas"), [(2, 2, 1), (4, 2, 1), (4, 4, 1), (4, 4, 2)])
def test_whichever_domains_are_lost_up_to_the_copies_the_newest_step_is_there(shm, ranks, domains, replicas):
    """At other numbers of ranks too; nothing is read from a disk (``restores`` has none)."""
    run_ranks(saves, ranks, shm / "saved", domains, [1, 2, 3], True, {"replicas": replicas})
    for number, lost in enumerate(itertools.combinations(range(domains), replicas)):
        shutil.copytree(shm / "saved", case := shm / "case")
        lose(case, *lost)
        others = ranks if number % 2 == 0 or domains == ranks else ranks // 2
        for found in run_ranks(restores, others, case, domains, {"replicas": replicas}):
            assert (found.step, found.place, found.skipped) == (3, "memory", ())
            lost_names = {f"host{n}" for n in lost}
            assert not lost_names & {source for sources in found.sources.values() for source in sources.values()}
        shutil.rmtree(case)


def refused(rank, ranks, shm, domains, **options):
    """The error of a restore, which is the same on all ranks."""
    with pytest.raises(CheckpointError) as caught:
        restores(rank, ranks, shm, domains, **options)
    return type(caught.value).__name__, str(caught.value)


def test_more_lost_domains_than_copies_are_an_error_that_names_what_is_missing(shm):
    run_ranks(saves, 2, shm, 2, [1, 2], True, {"replicas": 0})
    lose(shm, 1)
    ((kind, text),) = {*run_ranks(refused, 2, shm, 2)}
    assert kind == "CorruptError"
    assert "run a-run has no snapshot that can be loaded: step 2: no domain here has the part of rank 1" in text


def damaged_copy(shm, domain, rank, generation=-1):
    """One bit of the frames of a rank, as a domain has them."""
    path = generations(shm, domain)[generation] / f"__{rank}_0.distcp"
    flip_byte(path, path.stat().st_size // 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_damaged_copy_is_skipped_by_all_ranks_and_another_one_read(shm, ranks):
    run_ranks(saves, ranks, shm, 2, [1, 2], False)
    damaged_copy(shm, 0, 0)
    ours, theirs = "host0", "host1"
    for found in run_ranks(restores, ranks, shm, 2):
        assert found.step == 2
        assert found.sources[ours][0] == theirs
        assert len(found.skipped) == 1 and "step 2: " in found.skipped[0] and "__0_0.distcp" in found.skipped[0]


def test_a_step_whose_copies_are_all_damaged_gives_way_to_the_older_generation(shm):
    run_ranks(saves, 2, shm, 2, [1, 2, 3], False)
    for domain in (0, 1):
        assert len(generations(shm, domain)) == 2
        damaged_copy(shm, domain, 1)
    for found in run_ranks(restores, 2, shm, 2):
        assert found.step == 2
        assert any(text.startswith("step 3: ") for text in found.skipped)
        assert any("no domain here has the part of rank 1 of 2" in text for text in found.skipped)
    assert [len(generations(shm, domain)) for domain in (0, 1)] == [1, 1]  # the damaged one is gone


def test_when_all_is_damaged_the_error_says_so_and_a_checkpoint_is_taken_if_there_is_one(shm, tmp_path):
    run_ranks(saves, 2, shm, 2, [1, 2, 3], False)
    for domain, generation in itertools.product((0, 1), (-1, -2)):
        damaged_copy(shm, domain, 1, generation)
    shutil.copytree(shm, again := tmp_path / "again")
    ((kind, text),) = {*run_ranks(refused, 2, shm, 2)}
    assert kind == "CorruptError" and "step 3: " in text and "step 2: " in text
    run_ranks(plain_save, 2, retention.step_path(tmp_path / "disk", 1), 1)
    for found in run_ranks(restores, 2, again, 2, {"drain_to": tmp_path / "disk"}):
        assert (found.step, found.place) == (1, str(tmp_path / "disk/step-00000001"))


def plain_save(rank, ranks, path, step):
    dist_ckpt.save(state_of(rank, ranks, step), path)


@pytest.mark.parametrize("what", ["half sent", "no record", "half a record", "gone"])
def test_what_was_cut_short_counts_for_nothing(shm, what):
    run_ranks(saves, 2, shm, 2, [1, 2, 3], False)
    for domain in (0, 1):
        folder = generations(shm, domain)[-1]
        frames, record = folder / "__1_0.distcp", folder / "rank-1"
        if what == "half sent":
            frames.write_bytes(frames.read_bytes()[:-4096])
        elif what == "half a record":
            record.write_bytes(record.read_bytes()[:-10])
        else:
            (record if what == "no record" else frames).unlink()
    for found in run_ranks(restores, 2, shm, 2):
        assert found.step == 2
        (skipped,) = found.skipped
        assert "part of rank 1 of 2" in skipped
        assert {"half sent": " bytes of __1_0", "no record": "cut short", "half a record": "damaged record"}.get(
            what, "lacks the file __1_0.distcp"
        ) in skipped


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_snapshots_begins_and_one_that_was_killed_in_its_first_begins_again(shm, ranks):
    assert run_ranks(restores, ranks, shm, 1) == [None] * ranks
    run_ranks(saves, ranks, shm, 1, [1], False)
    (generations(shm, 0)[0] / "rank-0").unlink()
    assert run_ranks(restores, ranks, shm, 1) == [None] * ranks


def went_back(rank, ranks, shm):
    with tier_of(shm, rank, ranks, 1) as tier:
        for step in (1, 2, 3):
            tier.save(step, state_of(rank, ranks, step)).wait()
        with pytest.raises(CheckpointError, match="step 2 is saved after step 3; steps grow"):
            tier.save(2, state_of(rank, ranks, 2))
        found = tier.restore(state_of(rank, ranks, 0, fill=False), step=2)
        check_state(found.state, rank, ranks, 2)
        assert tier.steps() == [2]
        tier.save(3, state_of(rank, ranks, 3))
        tier.wait()
        with pytest.raises(CorruptError, match="has no whole snapshot of step 1 that can be loaded"):
            tier.restore(state_of(rank, ranks, 0, fill=False), step=1)
        return tier.steps()


def test_a_run_goes_back_to_a_step_that_it_names_and_saves_the_later_ones_again(shm):
    """The last snapshot of the first time is not settled when it goes back."""
    assert run_ranks(went_back, 2, shm) == [[2, 3], [2, 3]]


def test_steps_of_before_the_run_went_back_are_older_whatever_their_number(shm):
    run_ranks(saves, 2, shm, 2, [5, 6])
    shutil.copytree(shm / "host1", shm / "away")
    for domain in (0, 1):
        shutil.rmtree(generations(shm, domain)[-1])
    run_ranks(goes_on, 2, shm, 2, None, [1, 2])
    back = generations(shm, 1)[0].parent
    for generation in (shm / "away").glob("*/attempt-*"):  # the host is back, with steps 5 and 6
        shutil.copytree(generation, back / generation.name)
    assert {found.step for found in run_ranks(restores, 2, shm, 2)} == {2}


def unlike(rank, ranks, shm, what):
    options = {"replicas": rank} if what == "replicas" else {"drain_to": shm / str(rank)} if what == "drain_to" else {}
    tier = tier_of(shm, rank, ranks, 2, **options)
    kinds = MismatchError if what != "state" else ShardingError
    with pytest.raises(kinds) as caught:
        if what == "call" and rank:
            tier.wait()
        else:
            step = 1 + rank if what == "step" else 1
            state = state_of(rank, ranks, step)
            if what == "state":
                state["large"] = state_of(0, ranks, step)["large"]
            tier.save(step, state)
    tier.__exit__(ValueError, None, None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("step", "rank 0 calls save of step 1 of a memory tier, and rank 1 save of step 2"),
        ("replicas", "replicas is 0 on rank 0 and 1 on rank 1; all ranks of a memory tier are given the same"),
        ("drain_to", "drain_to is "),
        ("state", "large"),
    ],
)
def test_ranks_that_differ_are_all_told(shm, what, text):
    (found,) = {*run_ranks(unlike, 2, shm, what)}
    assert text in found


def one_folder(rank, ranks, shm, domains, folders):
    from sixfold.dist_ckpt import MemoryTier

    tier = MemoryTier(shm / folders[rank], "run", domain=domains[rank], timeout_s=10)
    with pytest.raises(MismatchError) as caught:
        tier.steps()
    return str(caught.value)


def test_a_folder_of_two_domains_and_a_domain_of_two_folders_are_refused(shm):
    (text,) = {*run_ranks(one_folder, 2, shm, ["a", "b"], ["x", "x"])}
    assert "is the folder of domain a (rank 0) and of domain b (rank 1): both would be lost together" in text
    (text,) = {*run_ranks(one_folder, 2, shm, ["a", "a"], ["x", "y"])}
    assert re.search("ranks 0 and 1 are of domain a, and have different folders", text)


def measured(rank, ranks, shm, domains, drains):
    """Memory that is stated, and the most that the files and arenas of each domain took."""
    drain = {"drain_to": shm / "disk", "drain_every": 2} if drains else {}
    with tier_of(shm, rank, ranks, domains, **drain) as tier:
        stated, most = tier.needed_bytes(state_of(rank, ranks, 1)), 0
        for step in range(1, 6):
            tier.save(step, state_of(rank, ranks, step)).wait()
            dist.barrier()
            most = max(most, used_bytes(shm / domain_of(rank, ranks, domains)))
            dist.barrier()
        return stated[domain_of(rank, ranks, domains)], most, tier._saver._arena.nbytes


@pytest.mark.parametrize(("ranks", "domains", "drains"), [(2, 1, False), (4, 2, False), (4, 4, True)])
def test_the_memory_that_is_stated_is_enough_and_not_twice_too_much(shm, ranks, domains, drains):
    found = run_ranks(measured, ranks, shm, domains, drains)
    each = ranks // domains
    for stated, most, arena in found:
        records_bytes = 64 * 1024 * each * 2 * 2  # tables and pages
        assert most + each * arena <= stated + records_bytes
        assert stated <= 2 * (most + each * arena)


def unequal(rank, ranks, shm, settled):
    """Ranks that hold different values under one name, each its own part of them."""
    tier = tier_of(shm, rank, ranks, 1)
    tier.save(1, state_of(rank, ranks, 1))
    tier.wait()
    state = state_of(rank, ranks, 2)
    state["plain"]["plain"] += rank
    tier.save(2, state).wait()
    told = ""
    if settled:
        with pytest.raises(ShardingError) as caught:
            tier.wait()
        told = str(caught.value)
        assert tier.steps() == [1]
    dist.barrier()
    tier.__exit__(ValueError, None, None)
    return told


@pytest.mark.parametrize("settled", [True, False])
def test_plain_tensors_that_differ_between_ranks_are_no_snapshot(shm, settled):
    """Told when it is settled; one that never was is skipped."""
    (told,) = {*run_ranks(unequal, 2, shm, settled)}
    assert ("plain" in told) == settled
    for found in run_ranks(restores, 2, shm, 1):
        assert found.step == 1
        assert any("plain" in text for text in found.skipped) != settled
