"""The one token rule: what each parameter does, and what it never depends on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rakv_cluster.model.cuts import thresholds
from rakv_cluster.model.noise import gumbel, row_key
from rakv_cluster.model.sampling import Choice, RuleRow, TokenRule, choose
from rakv_cluster.types import SamplingParams

VOCAB = 8
LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 3.0, -1.0, 2.0])
DRAWS = 4000

# Upper 1e-4 points of chi-square for the degrees of freedom used here.
CHI_SQUARE_LIMIT = {2: 18.42, 3: 21.11, 7: 29.88}


def rule(
    params: SamplingParams | None = None,
    prompt: tuple[int, ...] = (),
    accepted: tuple[int, ...] = (),
) -> TokenRule:
    made = TokenRule(params or SamplingParams(), prompt, VOCAB)
    for token in accepted:
        made.accept(token)
    return made


def pick(logits: torch.Tensor, row: RuleRow) -> Choice:
    (choice,) = choose(logits[None], [row])
    return choice


def draw(params: SamplingParams, logits: torch.Tensor = LOGITS, draws: int = DRAWS) -> torch.Tensor:
    """Counts of tokens over ``draws`` positions, in one batch."""
    made = rule(params)
    choices = choose(
        logits.expand(draws, -1), [RuleRow(made, position) for position in range(draws)]
    )
    return torch.tensor([choice.token_id for choice in choices]).bincount(minlength=len(logits))


def assert_distribution(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    expected = probabilities * counts.sum()
    possible = probabilities > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert float(statistic) < CHI_SQUARE_LIMIT[int(possible.sum()) - 1]


def softmax_of(*kept: int, temperature: float = 1.0) -> torch.Tensor:
    scores = torch.full_like(LOGITS, -math.inf)
    scores[list(kept)] = LOGITS[list(kept)] / temperature
    return scores.softmax(-1)


EVERY = range(VOCAB)


class TestGreedy:
    def test_takes_the_lowest_id_of_equal_logits(self) -> None:
        assert pick(LOGITS, RuleRow(rule(), 0)) == Choice(token_id=1)

    @pytest.mark.parametrize(("eps", "near"), [(0.0, False), (0.2, False), (0.3, True)])
    def test_a_near_tie_is_a_lead_below_eps(self, eps: float, near: bool) -> None:
        logits = LOGITS.clone()
        logits[5] = 3.25
        (choice,) = choose(logits[None], [RuleRow(rule(), 0)], eps=eps)
        assert choice == Choice(token_id=5, near_tie=near)

    def test_ignores_seed_and_cuts(self) -> None:
        params = SamplingParams(seed=9, top_k=1, top_p=0.1, min_p=0.5)
        assert pick(LOGITS, RuleRow(rule(params), 3)).token_id == 1

    def test_leaves_the_logits_alone(self) -> None:
        logits = LOGITS[None].clone()
        params = SamplingParams(presence_penalty=1.0, logit_bias={1: -5.0})
        choose(logits, [RuleRow(rule(params, accepted=(1,)), 0, banned=frozenset({5}))])
        assert torch.equal(logits[0], LOGITS)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_refuses_a_row_without_a_finite_winner(self, bad: float) -> None:
        logits = torch.stack([LOGITS, LOGITS])
        logits[1, 2] = bad
        with pytest.raises(ValueError, match=r"rows \[1\]"):
            choose(logits, [RuleRow(rule(), 0)] * 2)

    def test_refuses_a_row_with_everything_banned(self) -> None:
        with pytest.raises(ValueError, match="no finite highest score"):
            pick(LOGITS, RuleRow(rule(), 0, banned=frozenset(EVERY)))


class TestAdjustments:
    def test_presence_penalty_counts_an_emitted_token_once(self) -> None:
        params = SamplingParams(presence_penalty=0.6)
        logits = torch.tensor([0.0, 3.0, 2.5, *[-9.0] * 5])
        assert pick(logits, RuleRow(rule(params, accepted=(1, 1, 1)), 0)).token_id == 2
        params = replace(params, presence_penalty=0.4)
        assert pick(logits, RuleRow(rule(params, accepted=(1, 1, 1)), 0)).token_id == 1

    def test_frequency_penalty_counts_each_time(self) -> None:
        params = SamplingParams(frequency_penalty=0.2)
        logits = torch.tensor([0.0, 3.0, 2.5, *[-9.0] * 5])
        assert pick(logits, RuleRow(rule(params, accepted=(1, 1)), 0)).token_id == 1
        assert pick(logits, RuleRow(rule(params, accepted=(1, 1, 1)), 0)).token_id == 2

    def test_presence_and_frequency_ignore_the_prompt(self) -> None:
        params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
        assert pick(LOGITS, RuleRow(rule(params, prompt=(1, 1)), 0)).token_id == 1

    def test_repetition_penalty_sees_prompt_and_output(self) -> None:
        params = SamplingParams(repetition_penalty=2.0)
        made = rule(params, prompt=(1,), accepted=(5,))
        assert pick(LOGITS, RuleRow(made, 0)).token_id == 3

    def test_repetition_penalty_lowers_negative_logits_too(self) -> None:
        params = SamplingParams(repetition_penalty=2.0)
        logits = torch.tensor([-1.0, -1.5, *[-9.0] * 6])
        assert pick(logits, RuleRow(rule(params, prompt=(0,)), 0)).token_id == 1

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(presence_penalty=0.7, frequency_penalty=0.3),
            SamplingParams(repetition_penalty=1.7),
            SamplingParams(repetition_penalty=1.7, temperature=1.0, presence_penalty=1.0),
        ],
    )
    def test_pending_drafts_count_as_if_accepted(self, params: SamplingParams) -> None:
        made = rule(params, prompt=(3,), accepted=(1,))
        ahead = pick(LOGITS, RuleRow(made, 7, pending=(5, 5, 3)))
        unchanged = pick(LOGITS, RuleRow(made, 7))
        assert unchanged == pick(LOGITS, RuleRow(rule(params, (3,), (1,)), 7))
        for token in (5, 5, 3):
            made.accept(token)
        assert ahead == pick(LOGITS, RuleRow(made, 7))

    def test_logit_bias_is_added_after_penalties(self) -> None:
        params = SamplingParams(repetition_penalty=2.0, logit_bias={6: 4.5, 1: -0.5})
        choice = pick(LOGITS, RuleRow(rule(params, prompt=(6,)), 0))
        assert choice == Choice(token_id=5)  # 6: -1 * 2 + 4.5; 1: 3 - 0.5

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_banned_ids_are_never_chosen(self, temperature: float) -> None:
        made = rule(SamplingParams(temperature=temperature, logit_bias={1: 100.0}))
        rows = [RuleRow(made, p, banned=frozenset({1, 5})) for p in range(200)]
        chosen = {choice.token_id for choice in choose(LOGITS.expand(200, -1), rows)}
        assert 3 in chosen
        assert not chosen & {1, 5}


class TestSampling:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_draws_the_softmax(self, temperature: float) -> None:
        counts = draw(SamplingParams(temperature=temperature, seed=11))
        assert_distribution(counts, softmax_of(*EVERY, temperature=temperature))

    def test_seeds_draw_the_softmax_at_one_position(self) -> None:
        rows = [RuleRow(rule(SamplingParams(temperature=1.0, seed=s)), 5) for s in range(DRAWS)]
        chosen = torch.tensor([c.token_id for c in choose(LOGITS.expand(DRAWS, -1), rows)])
        assert_distribution(chosen.bincount(minlength=VOCAB), softmax_of(*EVERY))

    def test_top_k_keeps_the_k_highest(self) -> None:
        counts = draw(SamplingParams(temperature=1.0, top_k=3))
        assert_distribution(counts, softmax_of(1, 5, 3))

    def test_a_cut_never_separates_equal_scores(self) -> None:
        counts = draw(SamplingParams(temperature=1.0, top_k=1), draws=200)
        assert set(counts.nonzero().flatten().tolist()) == {1, 5}

    def test_top_p_keeps_the_token_that_reaches_the_mass(self) -> None:
        # Descending: .309 (1) .309 (5) .187 (3) .114 (7) ...; .309 + .309 < .7 <= .805
        counts = draw(SamplingParams(temperature=1.0, top_p=0.7))
        assert_distribution(counts, softmax_of(1, 5, 3))

    def test_top_p_is_of_what_top_k_left(self) -> None:
        # Of the top 4 the first three hold .877 of the mass, .805 of all.
        counts = draw(SamplingParams(temperature=1.0, top_k=4, top_p=0.85))
        assert_distribution(counts, softmax_of(1, 5, 3))

    def test_min_p_is_relative_to_the_likeliest(self) -> None:
        # exp(2.5 - 3) = .61, exp(2 - 3) = .37
        counts = draw(SamplingParams(temperature=1.0, min_p=0.5))
        assert_distribution(counts, softmax_of(1, 5, 3))

    def test_min_p_sees_the_temperature(self) -> None:
        counts = draw(SamplingParams(temperature=2.0, min_p=0.6))
        assert_distribution(counts, softmax_of(1, 5, 3, 7, temperature=2.0))

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=1.0, top_p=0.0),
            SamplingParams(temperature=1.0, top_k=1),
            SamplingParams(temperature=1.0, min_p=1.0),
            SamplingParams(temperature=1e-30),
            SamplingParams(temperature=1e-6),
        ],
    )
    def test_narrowest_settings_are_greedy(self, params: SamplingParams) -> None:
        logits = LOGITS.clone()
        logits[5] += 0.01
        assert draw(params, logits, draws=100)[5] == 100

    def test_switched_off_cuts_change_nothing(self) -> None:
        off = SamplingParams(temperature=1.0, seed=2)
        wide = replace(off, top_k=VOCAB, top_p=1.0, min_p=1e-30)
        assert torch.equal(draw(off), draw(wide))

    def test_huge_logits_stay_finite(self) -> None:
        choice = pick(LOGITS * 1e30, RuleRow(rule(SamplingParams(temperature=0.1)), 0))
        assert choice.token_id in {1, 5}

    @pytest.mark.parametrize("change", [{"seed": 4}, {"choice_index": 1}])
    def test_seed_and_choice_index_change_the_draws(self, change: dict[str, int]) -> None:
        params = SamplingParams(temperature=1.0, seed=3)
        rows = [RuleRow(rule(params), p) for p in range(100)]
        others = [RuleRow(rule(replace(params, **change)), p) for p in range(100)]
        logits = LOGITS.expand(100, -1)
        different = sum(
            a.token_id != b.token_id
            for a, b in zip(choose(logits, rows), choose(logits, others), strict=True)
        )
        assert different > 40

    def test_a_lone_survivor_that_nothing_can_replace_is_no_near_tie(self) -> None:
        logits = LOGITS.clone()
        logits[5] = 9.0
        row = RuleRow(rule(SamplingParams(temperature=1.0, top_k=1)), 0)
        (choice,) = choose(logits[None], [row], eps=1.0)
        assert choice == Choice(token_id=5)

    def test_a_near_tie_is_a_lead_of_perturbed_scores(self) -> None:
        params = SamplingParams(temperature=0.5, seed=8)
        noise = gumbel(torch.tensor(row_key(8, 0, 4)), torch.arange(VOCAB))
        best, second = ((LOGITS.double() / 0.5) + noise).topk(2).values.tolist()
        lead = (best - second) * 0.5
        for eps, near in ((0.9 * lead, False), (1.1 * lead, True)):
            (choice,) = choose(LOGITS[None], [RuleRow(rule(params), 4)], eps=eps)
            assert choice.near_tie is near


class TestThresholds:
    """Cuts on a vocabulary wider than the candidates looked at first."""

    WIDTH = 12_000

    def scaled(self) -> torch.Tensor:
        """Slowly falling scores in shuffled order: a broad cut keeps thousands."""
        order = torch.randperm(self.WIDTH, generator=torch.Generator().manual_seed(0))
        return -order.float() / 4000.0

    def survivors(self, params: SamplingParams) -> int:
        scaled = self.scaled()[None]
        return int((scaled >= thresholds(scaled, [params])[:, None]).sum())

    @pytest.mark.parametrize("top_k", [1, 100, 511, 512, 513, 8192, 8193, 11_999])
    def test_top_k_at_any_rank(self, top_k: int) -> None:
        assert self.survivors(SamplingParams(temperature=1.0, top_k=top_k)) == top_k

    @pytest.mark.parametrize("top_p", [0.0, 0.001, 0.05, 0.3, 0.9, 0.9999])
    def test_top_p_at_any_mass(self, top_p: float) -> None:
        mass = self.scaled().sort(descending=True).values.double().softmax(-1).cumsum(-1)
        expected = int((mass < top_p).sum()) + 1
        assert self.survivors(SamplingParams(temperature=1.0, top_p=top_p)) == expected

    @pytest.mark.parametrize("top_k", [600, 9000])
    def test_top_p_of_a_wide_top_k(self, top_k: int) -> None:
        kept = self.scaled().sort(descending=True).values.double()[:top_k]
        expected = int((kept.softmax(-1).cumsum(-1) < 0.9).sum()) + 1
        found = self.survivors(SamplingParams(temperature=1.0, top_k=top_k, top_p=0.9))
        assert found == expected

    def test_rows_do_not_share_their_cuts(self) -> None:
        params = [
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, top_k=5000),
            SamplingParams(temperature=1.0, top_p=0.01),
            SamplingParams(temperature=1.0, min_p=0.5),
        ]
        scaled = self.scaled().expand(len(params), -1)
        together = thresholds(scaled, params).tolist()
        alone = [thresholds(scaled[:1], [item]).item() for item in params]
        assert together == alone
        assert together[0] == -math.inf


class TestLogprobs:
    def test_are_of_the_raw_distribution(self) -> None:
        params = SamplingParams(temperature=0.5, presence_penalty=1.5, logit_bias={3: 9.0})
        choice = pick(LOGITS, RuleRow(rule(params, accepted=(1,)), 0, top_logprobs=2))
        expected = LOGITS.log_softmax(-1)
        assert choice.token_id == 3
        assert choice.logprob == pytest.approx(float(expected[3]))
        assert {token for token, _ in choice.top} == {1, 5}
        assert [value for _, value in choice.top] == pytest.approx(expected[[1, 5]].tolist())

    def test_zero_alternatives_still_give_the_own_logprob(self) -> None:
        choice = pick(LOGITS, RuleRow(rule(), 0, top_logprobs=0))
        assert choice.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[1]))
        assert choice.top == ()

    def test_only_for_rows_that_want_them(self) -> None:
        rows = [RuleRow(rule(), 0), RuleRow(rule(), 0, top_logprobs=99)]
        plain, full = choose(LOGITS.expand(2, -1), rows)
        assert plain.logprob is None
        assert len(full.top) == VOCAB


class TestNoise:
    def test_values_are_pinned(self) -> None:
        """A replica of another version must draw the same tokens for the same seed."""
        assert row_key(0, 0, 0) == 2558736989570252433
        assert row_key(42, 1, 1000) == 8460903610404928099
        noise = gumbel(torch.tensor(row_key(42, 1, 1000)), torch.tensor([0, 1, 49151]))
        expected = [-0.11600563616682993, 3.6155434104910893, 1.5072282744366323]
        assert noise.tolist() == pytest.approx(expected, rel=1e-12)

    def test_is_splitmix64(self) -> None:
        """Against the published first outputs of splitmix64 from state 1234567."""
        published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
        uniform = [((value >> 12) + 0.5) * 2.0**-52 for value in published]
        noise = gumbel(torch.tensor(1234567), torch.arange(3)).tolist()
        assert noise == pytest.approx([-math.log(-math.log(value)) for value in uniform])

    def test_keys_differ_in_every_word(self) -> None:
        words = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (1 << 63, 0, 0)]
        assert len({row_key(*word) for word in words}) == len(words)

    def test_is_finite_and_gumbel_distributed(self) -> None:
        noise = gumbel(torch.tensor(row_key(1, 2, 3)), torch.arange(1 << 16))
        assert bool(noise.isfinite().all())
        assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
        assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)

    def test_does_not_depend_on_the_other_tokens(self) -> None:
        key = torch.tensor(row_key(1, 2, 3))
        whole = gumbel(key, torch.arange(1000))
        some = torch.tensor([3, 77, 999])
        assert torch.equal(gumbel(key, some), whole[some])
