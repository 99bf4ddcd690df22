"""Goodput: the formula beside a simulated run, beside closed forms of the literature, and at its ends."""

import math

import pytest
from goodput_helpers import SimulatedRun
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.plan.goodput import FailureCosts, best_interval, goodput, young_interval


def costs_of(draw):
    """Costs in steps; failures are frequent, so that a simulation meets many. All that counts are ratios."""
    mtbf_s = draw(st.floats(15, 120))

    def seconds(most):
        return draw(st.floats(0, most * mtbf_s))

    save_s = seconds(0.1)
    return FailureCosts(
        mtbf_s=mtbf_s,
        step_s=1.0,
        snapshot_s=draw(st.floats(0, 0.5)),
        save_s=save_s,
        written_s=save_s + seconds(0.2),
        detect_s=seconds(0.1),
        recover_s=seconds(0.2),
        restart_s=draw(st.none() | st.floats(0, 0.5 * mtbf_s)),
        from_checkpoint=draw(st.sampled_from([0.0, 1.0]) | st.floats(0, 1)),
    )


any_costs = st.composite(costs_of)()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(costs=any_costs, share=st.floats(0, 0.6), seed=st.integers(0, 2**32))
def test_the_formula_is_within_five_percent_of_a_simulated_run(costs, share, seed):
    written_in = math.ceil((costs.written_s - costs.save_s) / costs.update_s)
    interval = max(1, written_in, round(share * costs.mtbf_s))
    run, found = SimulatedRun(costs, interval, seed), goodput(costs, interval)
    assert found.useful == pytest.approx(run.until(failures=8000), rel=0.05)
    for cause in ("detection", "recovery"):
        assert getattr(found, cause) == pytest.approx(run.spent[cause] / run.clock, rel=0.1, abs=0.005), cause


@settings(max_examples=8, deadline=None)
@given(costs=any_costs, seed=st.integers(0, 2**32))
def test_the_best_interval_has_the_goodput_of_the_best_simulated_one_within_five_percent(costs, seed):
    best = best_interval(costs, 400)
    others = {max(1, round(best * factor)) for factor in (0.2, 0.5, 0.8, 1, 1.3, 2)} | {1}
    simulated = {n: SimulatedRun(costs, n, seed).until(failures=1500) for n in others}
    assert simulated[best] >= 0.95 * max(simulated.values()), (best, simulated)


@settings(deadline=None)
@given(costs=any_costs, interval=st.integers(1, 400))
def test_the_shares_of_time_are_all_of_it(costs, interval):
    found = goodput(costs, interval)
    assert found.useful + sum(found.lost.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in (found.useful, *found.lost.values()))


@settings(max_examples=50, deadline=None)
@given(costs=any_costs)
def test_the_best_interval_is_the_best_of_all(costs):
    tried = [goodput(costs, n).useful for n in range(1, 401)]
    assert tried[best_interval(costs, 400) - 1] >= max(tried) * (1 - 1e-9)


@pytest.mark.parametrize("mtbf_s", [50.0, 1e3, 1e6])
@pytest.mark.parametrize("interval", [1, 7, 300])
def test_without_memory_it_is_dalys_equation(mtbf_s, interval):
    costs = FailureCosts(mtbf_s=mtbf_s, step_s=0.5, save_s=3.0, written_s=3.0, detect_s=1.0, recover_s=6.0)
    work = interval * 0.5
    wall = mtbf_s * math.exp(7.0 / mtbf_s) * math.expm1((work + 3.0) / mtbf_s)  # Daly 2006, equation 13
    assert goodput(costs, interval).useful == pytest.approx(work / wall, rel=1e-9)


def test_the_best_interval_is_youngs_where_failures_are_rare_and_saves_short():
    costs = FailureCosts(mtbf_s=1e6, step_s=1.0, save_s=2.0, written_s=2.0, recover_s=30.0)
    assert young_interval(costs) == 2000
    assert best_interval(costs, 10**6) == pytest.approx(2000, rel=0.01)
    costs = FailureCosts(mtbf_s=1e5, step_s=1.0, save_s=2.0, written_s=2.0, recover_s=30.0, from_checkpoint=0.1)
    assert young_interval(costs) == 2000 == pytest.approx(best_interval(costs, 10**6), rel=0.01)


def test_a_run_whose_failures_are_all_mended_in_memory_saves_as_seldom_as_it_may():
    costs = FailureCosts(mtbf_s=100.0, step_s=1.0, save_s=2.0, recover_s=3.0, from_checkpoint=0.0)
    assert best_interval(costs, 12345) == 12345 and young_interval(costs) == math.inf
    one_step = 100 * math.expm1(0.01) * math.exp(0.03)  # each is its own interval, as short as a step
    assert goodput(costs, 10**6).useful == pytest.approx(1 / one_step, rel=1e-4)


def test_a_save_that_counts_late_costs_what_is_done_meanwhile():
    early = FailureCosts(mtbf_s=1e4, step_s=1.0, save_s=1.0, written_s=1.0, recover_s=10.0)
    late = FailureCosts(mtbf_s=1e4, step_s=1.0, save_s=1.0, written_s=101.0, recover_s=10.0)
    more = goodput(late, 200).redone - goodput(early, 200).redone
    assert more == pytest.approx(100 / 1e4, rel=0.1)


def test_an_interval_shorter_than_a_save_waits_for_it():
    costs = FailureCosts(mtbf_s=1e9, step_s=1.0, save_s=0.5, written_s=10.5)
    assert goodput(costs, 4).saves == pytest.approx(6.5 / 10.5, rel=1e-3)
    assert goodput(costs, 10).saves == pytest.approx(0.5 / 10.5, rel=1e-3)


def test_a_job_that_fails_before_a_step_ends_does_none():
    costs = FailureCosts(mtbf_s=1.0, step_s=1e4, recover_s=1e5)
    found = goodput(costs, 10)
    assert found.useful == 0 and sum(found.lost.values()) == pytest.approx(1)
    assert goodput(FailureCosts(mtbf_s=1.0, step_s=1e-3, recover_s=1e5), 10).useful < 1e-100


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mtbf_s": 0.0}, "mtbf_s is 0.0; it is > 0 and finite"),
        ({"step_s": math.nan}, "step_s is nan; it is > 0 and finite"),
        ({"save_s": -1.0}, "save_s is -1.0; it is >= 0 and finite"),
        ({"from_checkpoint": 1.5}, "from_checkpoint is 1.5; it is a share, 0 to 1"),
    ],
)
def test_costs_that_cannot_be_are_refused(changed, said):
    with pytest.raises(ConfigError) as error:
        FailureCosts(**({"mtbf_s": 1.0, "step_s": 1.0} | changed))
    assert str(error.value) == f"costs of failures: {said}"
