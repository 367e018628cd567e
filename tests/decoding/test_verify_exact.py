"""Every verifier is exact, by two roads: loops over all drafts show that its rule gives the target's own distribution, and
chi-square tests show that the code does what the rule says, and that the first three tokens said are the target's.

A rule that is broken on purpose is noticed by the same tests.
"""

from dataclasses import dataclass

import pytest
import torch
from decoding import verify_cases
from decoding import verify_oracle as oracle
from decoding.verify_cases import World, chi_square, drawn, said_text, streams, world_of
from torch import Tensor

from drafttrain.decoding import verify_chain, verify_tree
from drafttrain.decoding.sampling import Sampling, choose_tokens, uniforms
from drafttrain.decoding.tree import check
from drafttrain.decoding.verify import Match, Verifier
from drafttrain.decoding.verify_chain import Block, TokenWise
from drafttrain.decoding.verify_tree import KSeq, Rejection

ROWS = 20_000
SAMPLINGS = [Sampling(temperature=t, top_p=p) for t in (0.7, 1.0) for p in (1.0, 0.9)]


@dataclass(frozen=True)
class Method:
    """A verifier, how its drafts are drawn, and what it must do with them."""

    verify: Verifier
    branching: tuple[int, ...]
    replacement: bool
    name: str

    def __str__(self) -> str:
        return f"{self.name}{self.branching}"

    def outcomes(self, world: World, sampling: Sampling) -> dict[tuple[int, ...], float] | None:
        if self.name == "block":
            return oracle.block(world, sampling, len(self.branching))
        if self.name == "match":
            return None
        return oracle.tree(world, sampling, self.branching, self.replacement, kseq=self.name == "kseq")


CHAINS = [
    Method(verify, (1,) * n, False, name) for n in (1, 2, 3) for name, verify in (("token-wise", TokenWise()), ("block", Block()))
]
TREES = [
    Method(Rejection((1, 1, 1)), (1, 1, 1), False, "recursive"),
    Method(Rejection((2, 2)), (2, 2), False, "recursive"),
    Method(Rejection((3, 2)), (3, 2), False, "recursive"),
    Method(Rejection((3, 1)), (3, 1), False, "recursive"),
    Method(Rejection((2, 4), replacement=True), (2, 2), True, "independent"),
    Method(Rejection((3, 3), replacement=True), (3, 1), True, "independent"),
    Method(KSeq((2, 4)), (2, 2), True, "kseq"),
    Method(KSeq((3, 3)), (3, 1), True, "kseq"),
    Method(KSeq((1, 1, 1)), (1, 1, 1), True, "kseq"),
    Method(Match(2), (2, 2), False, "match"),
]
METHODS = CHAINS + TREES


def case(method: Method, kind: str, sampling: Sampling, vocab: int, seed: int, stopping: bool = False, rows: int = ROWS):
    world = world_of(kind, vocab, seed, stopping)
    stream, length = streams(rows, seed), torch.arange(rows) % 7 + 3
    text = torch.zeros(rows, dtype=torch.long)
    logits, proposal = drawn(world, method.branching, method.replacement, sampling, stream, length, text)
    check(proposal, replacement=method.replacement)
    verdict = method.verify(logits, proposal, sampling, stream, length)
    return world, stream, length, said_text(world, proposal, verdict, text), verdict.accepted_B


def p_of_outcomes(method: Method, world: World, sampling: Sampling, text_B: Tensor) -> float:
    """Chi-square of what a round said against the oracle's rule."""
    expected = torch.zeros(sum(world.vocab**d for d in range(len(method.branching) + 2)))
    outcomes = method.outcomes(world, sampling)
    assert outcomes is not None
    for text, chance in outcomes.items():
        expected[number(text, world.vocab)] = len(text_B) * chance
    return chi_square(torch.bincount(text_B, minlength=len(expected)), expected)


def p_of_first_three(
    world: World, sampling: Sampling, stream_B: Tensor, length_B: Tensor, text_B: Tensor, size_B: Tensor
) -> float:
    """Chi-square of the first three tokens against the target; plain decoding goes on where the round said fewer."""
    V = world.vocab
    for _ in range(3):
        logits = world.target_IV[text_B % len(world.target_IV)][:, None]
        token_B = choose_tokens(logits, sampling, stream_B, (length_B + size_B + 1)[:, None])[:, 0]
        text_B = torch.where(size_B < 3, world.after(text_B, token_B), text_B)
        size_B = size_B + (size_B < 3)
    for _ in range(3):  # at most five tokens were said in a round of these tests
        text_B = torch.where(size_B > 3, (text_B - 1) // V, text_B)
        size_B = size_B - (size_B > 3).long()
    p, _ = oracle.models(world, sampling)
    expected = torch.zeros(1 + V + V**2 + V**3)
    for text, chance in oracle.first_tokens({(): 1.0}, p).items():
        expected[number(text, V)] = len(text_B) * chance
    return chi_square(torch.bincount(text_B, minlength=len(expected)), expected)


def number(text: tuple[int, ...], vocab: int) -> int:
    i = 0
    for token in text:
        i = i * vocab + token + 1
    return i


def both_p(method: Method, kind: str, sampling: Sampling, vocab: int, seed: int, stopping: bool = False) -> tuple[float, float]:
    world, stream, length, text, accepted = case(method, kind, sampling, vocab, seed, stopping)
    rule = 1.0 if method.name == "match" else p_of_outcomes(method, world, sampling, text)
    return rule, p_of_first_three(world, sampling, stream, length, text, accepted + 1)


# ---- the rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in METHODS if m.name != "match"], ids=str)
@pytest.mark.parametrize("kind", ["apart", "near", "equal", "reduced"])
def test_the_rule_says_what_the_target_says(method, kind):
    for seed, sampling in enumerate(SAMPLINGS):
        world = world_of(kind, 3, seed, stopping=seed % 2 == 1)
        outcomes = method.outcomes(world, sampling)
        p, _ = oracle.models(world, sampling)
        said, wanted = oracle.first_tokens(outcomes, p), oracle.first_tokens({(): 1.0}, p)
        for text in set(said) | set(wanted):
            assert said.get(text, 0.0) == pytest.approx(wanted.get(text, 0.0), abs=1e-9)


# ---- the code ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("number", range(4))
def test_code_follows_the_rule_and_says_what_the_target_says(method, number):
    kind = ("apart", "near", "reduced", "equal")[number]
    rule, target = both_p(method, kind, SAMPLINGS[(number + len(method.branching)) % 4], 4, seed=number, stopping=number == 1)
    assert rule > 1e-3 and target > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", ["apart", "near", "equal", "reduced"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"{s.temperature}-{s.top_p}")
def test_whole_grid(method, kind, sampling):
    for vocab in (3, 5):
        for stopping in (False, True):
            rule, target = both_p(method, kind, sampling, vocab, seed=10 * vocab, stopping=stopping)
            assert rule > 1e-4 and target > 1e-4  # thousands of p-values: some lie below 1e-3 by chance


# ---- more than one round -----------------------------------------------------------------------------------------------


def p_of_rounds(method: Method, world: World, sampling: Sampling, seed: int) -> float:
    """Chi-square of the first three tokens where every one of them is said by rounds of drafting and verification."""
    stream, length = streams(ROWS, seed), torch.full((ROWS,), 5)
    text, size = torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, dtype=torch.long)
    for _ in range(3):
        logits, proposal = drawn(world, method.branching, method.replacement, sampling, stream, length + size, text)
        verdict = method.verify(logits, proposal, sampling, stream, length + size)
        going = size < 3
        text = torch.where(going, said_text(world, proposal, verdict, text), text)
        size = torch.where(going, size + verdict.accepted_B + 1, size)
    return p_of_first_three(world, sampling, stream, length, text, size)


@pytest.mark.parametrize("method", [CHAINS[4], CHAINS[5], TREES[1], TREES[6]], ids=str)
def test_rounds_after_rounds(method):
    assert p_of_rounds(method, world_of("apart", 3, 2), Sampling(temperature=1.0), seed=2) > 1e-3


def test_numbers_of_an_earlier_round_would_bias(monkeypatch):
    """Why `round_uniforms` goes by the anchor: drafting a position again with the number of its first time is noticed."""
    method, world, sampling = CHAINS[5], world_of("near", 3, 4), Sampling(temperature=1.0)
    assert p_of_rounds(method, world, sampling, seed=1) > 1e-3

    def by_position(stream_B: Tensor, length_B: Tensor, count: int, purpose: int) -> Tensor:
        return uniforms(stream_B, length_B[:, None] + torch.arange(count), purpose)

    for module in (verify_chain, verify_cases):
        monkeypatch.setattr(module, "round_uniforms", by_position)
    assert p_of_rounds(method, world, sampling, seed=1) < 1e-6


# ---- broken on purpose -------------------------------------------------------------------------------------------------


def the_whole_target(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    return p_BV


@pytest.mark.parametrize("method", [CHAINS[0], CHAINS[3], TREES[1], TREES[4], TREES[6]], ids=str)
def test_a_wrong_residual_is_noticed(method, monkeypatch):
    monkeypatch.setattr(verify_chain if method in CHAINS else verify_tree, "residual", the_whole_target)
    rule, target = both_p(method, "apart", Sampling(temperature=1.0), 4, seed=0)
    assert rule < 1e-6 and target < 1e-6


@pytest.mark.parametrize(
    ("verify", "right"),
    [
        (Rejection((3, 2), replacement=True), TREES[2]),  # a rejected sibling stays in q though it cannot be drawn again
        (Rejection((3, 3)), TREES[5]),  # a rejected sibling leaves q though it can
        (KSeq((3, 2)), TREES[2]),  # siblings are not independent
    ],
    ids=str,
)
def test_siblings_taken_for_what_they_are_not_are_noticed(verify, right):
    wrong = Method(verify, right.branching, right.replacement, right.name)
    rule, target = both_p(wrong, "apart", Sampling(temperature=1.0), 4, seed=0)
    assert rule < 1e-6 and target < 1e-6


def test_too_low_a_rho_is_noticed(monkeypatch):
    monkeypatch.setattr(verify_tree, "_least_rho", lambda p_BV, q_BV, count_B1: torch.ones_like(count_B1))
    rule, target = both_p(TREES[7], "apart", Sampling(temperature=1.0), 4, seed=0)
    assert rule < 1e-6 and target < 1e-6


def test_a_greater_rho_is_exact_too(monkeypatch):
    monkeypatch.setattr(verify_tree, "_least_rho", lambda p_BV, q_BV, count_B1: count_B1.clamp(min=1))
    rule, target = both_p(TREES[7], "apart", Sampling(temperature=1.0), 4, seed=0)
    assert rule < 1e-6 and target > 1e-3  # fewer are accepted than by the rule


def test_children_and_depths_beyond_the_widths_are_ignored_exactly():
    narrow = Method(Rejection((2, 1)), (3, 2), False, "narrow")
    _, target = both_p(narrow, "apart", SAMPLINGS[0], 4, seed=3)
    shallow = Method(Rejection((1,)), (1, 1, 1), False, "shallow")
    assert target > 1e-3 and both_p(shallow, "near", SAMPLINGS[0], 4, seed=3)[1] > 1e-3
