"""Random numbers and draws that drafting and verification rest on."""

import itertools

import pytest
import torch
from decoding import verify_oracle as oracle
from decoding.verify_cases import chi_square, streams

from drafttrain.decoding.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    Sampling,
    choose_tokens,
    draw,
    draw_without_replacement,
    probabilities,
    round_uniforms,
    uniforms,
)

ROWS = 20_000


def test_the_target_s_numbers_stay_what_they_were():
    """Recorded answers were sampled with these: SplitMix64 of the stream's state after position + 1 steps, top 53 bits."""

    def splitmix(state: int) -> float:
        x = state % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return ((x ^ (x >> 31)) >> 11) / 2**53

    stream, position = streams(5), torch.tensor([[0, 1, 77]]).expand(5, 3)
    wanted = [[splitmix(s + (p + 1) * 0x9E3779B97F4A7C15) for p in (0, 1, 77)] for s in stream.tolist()]
    assert uniforms(stream, position).tolist() == wanted == uniforms(stream, position, TARGET).tolist()


def test_numbers_are_uniform_and_independent():
    """Of neighbouring slots, positions, purposes and rows: pairs fill a grid of 8 x 8 cells evenly."""
    stream, length = streams(ROWS), torch.arange(ROWS) % 3
    of_round = {
        (purpose, shift): round_uniforms(stream, length + shift, 3, purpose)
        for purpose in (DRAFT, ACCEPT, RESIDUAL)
        for shift in (0, 1)
    }
    columns = [column for numbers in of_round.values() for column in numbers.unbind(1)]
    columns += [uniforms(stream, length[:, None], purpose)[:, 0] for purpose in (TARGET, DRAFT)]
    columns += [uniforms(stream, length[:, None] + shift)[:, 0] for shift in (1, 2, 3)]
    smallest, pairs = 1.0, 0
    for one, other in [*itertools.combinations(columns, 2), *((c, c.roll(1)) for c in columns)]:
        cell = (one * 8).long() * 8 + (other * 8).long()
        smallest, pairs = min(smallest, chi_square(torch.bincount(cell, minlength=64), torch.full((64,), ROWS / 64))), pairs + 1
    assert smallest > 1e-3 / pairs


def test_probabilities_sum_to_one_and_choose_tokens_draws_from_them():
    logits = torch.randn(50, 4, 30, generator=torch.Generator().manual_seed(0))
    for sampling in (
        Sampling(temperature=0.7, top_p=0.6),
        Sampling(temperature=1.3, top_k=5, top_p=0.9),
        Sampling(temperature=1.0),
    ):
        p = probabilities(logits, sampling)
        torch.testing.assert_close(p.sum(-1), torch.ones(50, 4))
        stream, position = torch.arange(50), torch.arange(4).expand(50, 4)
        agree = choose_tokens(logits, sampling, stream, position) == draw(p, uniforms(stream, position))
        assert agree.all()
    wanted = oracle.processed(logits[3, 2].double().tolist(), Sampling(temperature=0.7, top_p=0.6))
    torch.testing.assert_close(probabilities(logits, Sampling(temperature=0.7, top_p=0.6))[3, 2], torch.tensor(wanted))


def test_a_draw_inverts_the_distribution_function():
    p = torch.rand(20, 3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.double) * (torch.arange(7) % 3 != 1)
    u = torch.rand(20, 3, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    for b, t in itertools.product(range(20), range(3)):
        rest, token = float(u[b, t] * p[b, t].sum()), 0
        while rest >= p[b, t, token]:
            rest, token = rest - float(p[b, t, token]), token + 1
        assert draw(p, u)[b, t] == token


@pytest.mark.parametrize("last", [1 - 2.0**-53, 1 - 2.0**-30, 0.0])
def test_a_draw_never_takes_what_has_no_probability(last):
    p = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0, 0.0])
    assert draw(p[None], torch.tensor([last], dtype=torch.double)).item() in (1, 3)


def test_draws_without_replacement_come_in_the_right_order():
    for q, count in (([0.5, 0.3, 0.15, 0.05], 3), ([0.6, 0.0, 0.4], 3), ([0.0, 1.0], 2)):
        tokens, exists = draw_without_replacement(
            torch.tensor(q).expand(ROWS, -1), round_uniforms(streams(ROWS), torch.zeros(ROWS, dtype=torch.long), count, DRAFT)
        )
        expected = {drafts: ROWS * chance for drafts, chance in oracle.sequences(q, count, False)}
        counts = dict.fromkeys(expected, 0)
        for row, there in zip(tokens.tolist(), exists.tolist(), strict=True):
            assert there == sorted(there, reverse=True)
            counts[tuple(row[: sum(there)])] += 1
        assert chi_square(torch.tensor(list(counts.values())), torch.tensor(list(expected.values()))) > 1e-3
