"""The vote over digests of copies, in every small case, against the words of its note."""

import itertools

import pytest

from sixfold.gpt.engine.replica_verdict import judge


def outvoted(by_rank):
    """Ranks against which more than half of all ranks have one digest together."""
    ranks = list(by_rank)
    return {
        rank
        for rank in ranks
        if any(
            2 * sum(by_rank[other] == digest for other in ranks) > len(ranks) and by_rank[rank] != digest
            for digest in by_rank.values()
        )
    }


def patterns(size):
    """Every way in which so many ranks have equal and other digests, which letters do not matter for."""
    if size == 0:
        return [""]
    return [
        before + letter for before in patterns(size - 1) for letter in "abcde"[: len(set(before)) + 1]
    ]  # fmt: skip


def test_one_shard_in_every_case_of_up_to_five_ranks():
    for size in range(1, 6):
        for digests in patterns(size):
            by_rank = dict(enumerate(digests))
            verdict = judge({"w": by_rank})
            named = outvoted(by_rank)
            assert verdict.minority == dict.fromkeys(sorted(named), ("w",))
            assert verdict.agree == (len(set(digests)) == 1)
            if not named and not verdict.agree:
                camps = verdict.undecided["w"]
                assert sorted(rank for camp in camps for rank in camp) == list(range(size))
                assert [{by_rank[rank] for rank in camp} for camp in camps] == [{d} for d in dict.fromkeys(digests)]
                assert max(map(len, camps)) * 2 <= size
            else:
                assert verdict.undecided == {}


def test_two_shards_in_every_case_of_up_to_four_ranks_that_hold_them():
    sets = [ranks for size in (2, 3, 4) for ranks in itertools.combinations(range(4), size)]
    for first, second in itertools.product(sets, repeat=2):
        for digests in itertools.product(patterns(len(first)), patterns(len(second))):
            shards = {
                "v": dict(zip(first, digests[0], strict=True)),
                "w": dict(zip(second, digests[1], strict=True)),
            }
            verdict, named = judge(shards), outvoted(shards["v"]) | outvoted(shards["w"])
            assert verdict.minority.keys() == named
            for name, by_rank in shards.items():
                trusted = {rank: digest for rank, digest in by_rank.items() if rank not in named}
                majority = any(2 * list(by_rank.values()).count(one) > len(by_rank) for one in by_rank.values())
                is_open = not majority and len(set(trusted.values())) > 1
                assert (name in verdict.undecided) == is_open, (shards, verdict)
                if is_open:
                    assert {rank for camp in verdict.undecided[name] for rank in camp} == trusted.keys()


def test_a_rank_that_one_shard_names_has_no_vote_on_another():
    norm = {0: "n", 1: "n", 2: "n", 3: "x"}  # which tensor parallelism leaves whole
    verdict = judge({"norm": norm, "q": {1: "q", 3: "y"}, "k": {0: "k", 2: "k"}})
    assert verdict.minority == {3: ("norm", "q")} and verdict.undecided == {}
    verdict = judge({"q": {1: "q", 3: "y"}, "norm": norm})
    assert verdict.minority == {3: ("norm", "q")}, "whatever the order"


def test_two_wrong_ranks_of_five_are_both_named_with_their_shards():
    verdict = judge({"v": dict(enumerate("aabaa")), "w": dict(enumerate("aacda"))})
    assert verdict.minority == {2: ("v", "w"), 3: ("w",)}


def test_two_pairs_are_undecided_and_stand_apart():
    verdict = judge({"w": {7: "a", 3: "b", 5: "a", 1: "b"}})
    assert verdict.undecided == {"w": ((1, 3), (5, 7))} and not verdict.minority and not verdict.agree


@pytest.mark.parametrize("digests", [{}, {"w": {4: "a"}}, {"v": {0: 1, 1: 1}, "w": {0: 2, 1: 2}}])
def test_what_is_equal_or_alone_agrees(digests):
    assert judge(digests).agree
