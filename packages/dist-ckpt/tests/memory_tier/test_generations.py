"""Which generation is whole: all small cases, beside an oracle that tries every way to take one copy of each part."""

import itertools
import random

import pytest

from sixfold.dist_ckpt.memory_tier.generations import Generation, Held, Part, Saved, kept, whole_ones

DOMAINS = ("a", "b")


def generation(attempt, step):
    return Generation(attempt, step, f"{attempt:08x}{step:08x}")


def ways(listings, wanted, banned):
    """Every way to take one copy of each part of a generation: the parts of all ranks, each from one domain."""
    copies = [
        (rank, domain, part.ranks)
        for domain, listing in listings.items()
        for rank, part in (listing[wanted].parts if wanted in listing else {}).items()
        if not part.problem and (wanted, rank, domain) not in banned
    ]
    seen = {part.ranks for listing in listings.values() if wanted in listing for part in listing[wanted].parts.values()}
    for chosen in itertools.chain.from_iterable(itertools.combinations(copies, n) for n in range(1, len(copies) + 1)):
        if len(seen - {0}) == 1 and sorted(rank for rank, _, _ in chosen) == list(range(chosen[0][2])):
            yield {rank: domain for rank, domain, _ in chosen}


def by_hand(listings, banned):
    """The newest generation that has such a way, with the domains that any way takes a part from."""
    known = {wanted for listing in listings.values() for wanted in listing}
    for wanted in sorted(known, key=lambda g: (g.attempt, g.step, g.save_id), reverse=True):
        if found := [*ways(listings, wanted, banned)]:
            return wanted, [sorted({way[rank] for way in found}) for rank in sorted(found[0])]
    return None


def states(ranks):
    """What a domain may have of one rank's part of a generation."""
    return (None, Part(ranks), Part(ranks, "has 3 of 4 bytes of __0_0.distcp"), Part(0, "was cut short"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_newest_whole_generation_is_the_one_that_trying_all_ways_finds(ranks):
    """Two domains, two generations, each part in any of four states: all cases, or every 29th of them."""
    new, old = generation(1, 2), generation(1, 1)
    places = [(domain, wanted, rank) for domain in DOMAINS for wanted in (new, old) for rank in range(ranks)]
    cases = itertools.product(states(ranks), repeat=len(places))
    for number, case in enumerate(cases):
        if ranks == 2 and number % 29:
            continue
        listings = {domain: {} for domain in DOMAINS}
        for (domain, wanted, rank), part in zip(places, case, strict=True):
            if part is not None:
                listings[domain].setdefault(wanted, Held({})).parts[rank] = part
        choices, skipped = whole_ones(listings)
        expected = by_hand(listings, ())
        found = choices[0] if choices else None
        assert (found and (found.generation, [*map(list, found.holders)])) == expected, (listings, found, expected)
        assert {c.generation for c in choices} | {s.generation for s in skipped} == {
            wanted for listing in listings.values() for wanted in listing
        }


@pytest.mark.parametrize("seed", range(60))
def test_banned_copies_and_jobs_of_other_sizes_are_not_taken(seed):
    rng = random.Random(seed)
    known = [generation(rng.randint(1, 2), rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
    listings, copies = {}, []
    for domain in "abc"[: rng.randint(1, 3)]:
        listings[domain] = {}
        for wanted in {*known}:
            ranks = rng.choice([2, 2, 2, 3])
            parts = {r: Part(ranks, rng.choice(["", "", "", "is gone"])) for r in range(ranks) if rng.random() < 0.8}
            if parts:
                listings[domain][wanted] = Held(parts)
                copies += [(wanted, rank, domain) for rank in parts]
    banned = {copy for copy in copies if rng.random() < 0.15}
    choices, _ = whole_ones(listings, banned)
    found = choices[0] if choices else None
    assert (found and (found.generation, [*map(list, found.holders)])) == by_hand(listings, banned)


def test_a_later_attempt_goes_before_a_later_step():
    """A host that was away comes back with steps of before the run went back."""
    parts = Held({0: Part(1)})
    listings = {"away": {generation(1, 9): parts}, "here": {generation(2, 7): parts}}
    assert [choice.generation.step for choice in whole_ones(listings)[0]] == [7, 9]


def test_a_reason_names_the_step_the_rank_and_what_is_wrong_with_its_copies():
    listings = {"a": {generation(1, 5): Held({0: Part(2), 1: Part(2, "has 3 of 4 bytes of __1_0.distcp")}, True)}}
    _, (skipped,) = whole_ones(listings)
    assert skipped.was_whole
    assert str(skipped) == (
        "step 5: no domain here has the part of rank 1 of 2 (its copy in domain a has 3 of 4 bytes of __1_0.distcp)"
    )


def test_own_copies_go_before_those_of_others_which_take_turns():
    parts = Held({rank: Part(4) for rank in range(4)})
    listings = {
        "a": {generation(1, 1): Held({0: Part(4)})},
        "b": {generation(1, 1): parts},
        "c": {generation(1, 1): parts},
    }
    (choice,), _ = whole_ones(listings)
    assert choice.sources("a") == {0: "a", 1: "c", 2: "b", 3: "c"}
    assert choice.sources("b") == dict.fromkeys(range(4), "b")


@pytest.mark.parametrize(
    ("replicated", "stay"),
    [
        ([True], [0]),
        ([True, True], [1]),
        ([True, False], [0, 1]),
        ([False, False], [1]),
        ([True, False, False], [0, 2]),
        ([False, True, False], [1, 2]),
        ([True, False, True], [2]),
    ],
)
def test_the_newest_stays_and_the_newest_with_all_its_copies(replicated, stay):
    saved = [Saved(generation(1, step), value) for step, value in enumerate(replicated)]
    assert [one.generation.step for one in kept(saved)] == stay


@pytest.mark.parametrize("name", ["step-00000001", "attempt-1-step-1-0123456789abcdef", "../etc", "", ".",
                                  "attempt-000001-step-00000001-0123456789abcdef/x",
                                  "attempt-000001-step-00000001-0123456789ABCDEF",
                                  "attempt-0000001-step-00000001-0123456789abcdef"])  # fmt: skip
def test_other_names_are_of_no_generation(name):
    assert Generation.of_name(name) is None


def test_a_name_says_all_of_a_generation():
    for attempt, step in [(1, 0), (12, 7), (1_000_000, 10**9)]:
        assert Generation.of_name(generation(attempt, step).name) == generation(attempt, step)
