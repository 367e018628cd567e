"""How many tokens a head should say: coverage of new text against brute force and real draws, the optimum against a plain scan."""

from dataclasses import replace

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.vocab import Cost, Counts, arithmetic, best_size, choose, count, coverage, describe

COST = Cost(outside=7_000, per_token=32, target=100_000, drafts=4)


def zipf(vocab: int, power: float = 1.1) -> torch.Tensor:
    """Frequencies of a language whose ids are in no order."""
    shares = 1.0 / torch.arange(1, vocab + 1).double() ** power
    return (shares / shares.sum())[torch.randperm(vocab, generator=torch.Generator().manual_seed(3))]


def bunched_texts(number: int, vocab: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts and answers that each dwell on a subject of 12 words: half of a text's tokens are of its subject."""
    g = torch.Generator().manual_seed(seed)
    language = zipf(vocab)
    texts = []
    for _ in range(number):
        subject = language.multinomial(12, replacement=True, generator=g)
        common = language.multinomial(60, replacement=True, generator=g)
        dwelt = subject[torch.randint(12, (60,), generator=g)]
        ids = torch.where(torch.rand(60, generator=g) < 0.5, dwelt, common)
        texts.append((ids, torch.arange(60) >= int(torch.randint(5, 20, (), generator=g))))
    return texts


def summed(texts, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts in answers, and around them."""
    supervised_V, other_V = (torch.zeros(vocab, dtype=torch.int64) for _ in range(2))
    for ids, mask in texts:
        supervised_V += ids[mask].bincount(minlength=vocab)
        other_V += ids[~mask].bincount(minlength=vocab)
    return supervised_V, other_V


def counted(texts, vocab: int, among_V=None) -> Counts:
    return count(*summed(texts, vocab), texts, among_V)


@pytest.mark.parametrize("seed", range(4))
def test_leaving_out_equals_choosing_again_without_each_text(seed):
    """The places, found by subtracting counts, against `choose` on the counts of the other texts, summed anew."""
    vocab, texts = 90, bunched_texts(9, 90, seed)
    counts = counted(texts, vocab)
    for size in (1, 2, 5, 17, 40, 64, 89, 90):
        covered = 0
        for left, (ids, mask) in enumerate(texts):
            rest_V, prompts_V = summed([text for index, text in enumerate(texts) if index != left], vocab)
            covered += int(choose(rest_V, size, prompts_V).t2d[ids[mask]].sum())
        assert float(counts.expected(torch.tensor([size]))[0]) == pytest.approx(covered / counts.left_out)


def test_leaving_out_among_a_few_tokens_equals_choosing_among_them():
    """A head that is being trimmed can say some tokens only; all answer tokens still count."""
    vocab, texts = 90, bunched_texts(8, 90, 5)
    among = torch.rand(vocab, generator=torch.Generator().manual_seed(1)) < 0.6
    ids = among.nonzero()[:, 0]
    counts = counted(texts, vocab, among)
    assert counts.total == counts.left_out == sum(int(mask.sum()) for _, mask in texts)
    for size in (1, 7, 30, len(ids)):
        covered = 0
        for left, (text, mask) in enumerate(texts):
            rest_V, prompts_V = summed([other for index, other in enumerate(texts) if index != left], vocab)
            kept = ids[choose(rest_V[ids], size, prompts_V[ids]).ids]
            covered += int(torch.isin(text[mask], kept).sum())
        assert float(counts.expected(torch.tensor([size]))[0]) == pytest.approx(covered / counts.left_out)


def test_texts_of_one_token_give_good_and_turing_s_estimate():
    """The unseen mass is N_1 / N; a singleton that is left out is found again only if the order takes its place by id."""
    vocab = 4000
    ids = zipf(vocab).multinomial(3000, replacement=True, generator=torch.Generator().manual_seed(0))
    counts = counted([(token[None], torch.ones(1, dtype=torch.bool)) for token in ids], vocab)
    seen = int((counts.supervised_V > 0).sum())
    singletons = int((counts.supervised_V == 1).sum())
    assert singletons > 300
    # Without a singleton one place is free, and the lowest id that was never seen takes it.
    lowest_unseen = int((counts.supervised_V == 0).nonzero()[0])
    lucky = int(((counts.supervised_V == 1) & (torch.arange(vocab) < lowest_unseen)).sum())
    assert float(counts.expected(torch.tensor([seen]))[0]) == pytest.approx(1 - (singletons - lucky) / 3000)


def test_expected_coverage_is_that_of_held_out_draws():
    """Means over 40 samples: what is expected against what new texts show, within their common error (z < 4); training is far above."""
    vocab, sizes = 3000, torch.tensor([64, 256, 1024])
    gaps, trained = [], []
    for seed in range(40):
        counts = counted(bunched_texts(30, vocab, 100 + seed), vocab)
        held_V = summed(bunched_texts(60, vocab, 10_000 + seed), vocab)[0]
        held = torch.tensor([coverage(choose(counts.supervised_V, int(n), counts.other_V), held_V) for n in sizes])
        gaps.append(counts.expected(sizes) - held)
        trained.append(counts.trained(sizes) - held)
    gap_RS = torch.stack(gaps)
    z_S = gap_RS.mean(0) / (gap_RS.std(0) / len(gaps) ** 0.5)
    assert (z_S.abs() < 4).all(), z_S
    assert (gap_RS.mean(0).abs() < 0.02).all() and (torch.stack(trained).mean(0)[1:] > 0.15).all()


def test_the_best_size_is_that_of_a_plain_scan_in_python():
    vocab = 1000
    counts = counted(bunched_texts(40, vocab, 7), vocab)
    places = counts.places_V.tolist()
    for cost in (COST, replace(COST, per_token=320), replace(COST, drafts=1), replace(COST, target=10_000_000)):
        values = {}
        for size in [*range(64, vocab, 64), vocab]:
            right = 0.7 * sum(places[:size]) / counts.left_out
            tau = 1 + sum(right**k for k in range(1, cost.drafts + 1))
            values[size] = tau / (1 + cost.drafts * (cost.outside + cost.per_token * size) / cost.target)
        assert best_size(counts, cost) == max(values, key=lambda size: values[size])
    sizes = [best_size(counts, replace(COST, per_token=h)) for h in (0, 4, 12, 32, 100_000)]
    assert sizes[0] == vocab and sizes[-1] == 64 and sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3


def test_the_best_size_covers_what_must_be_covered():
    vocab = 1000
    counts = counted(bunched_texts(40, vocab, 7), vocab)
    dear = replace(COST, per_token=10_000)
    free = best_size(counts, dear)
    assert coverage(choose(counts.supervised_V, free, counts.other_V), counts.supervised_V) < 0.9
    bound = best_size(counts, dear, 0.9)
    assert coverage(choose(counts.supervised_V, bound, counts.other_V, 0.9), counts.supervised_V) >= 0.9
    smaller = choose(counts.supervised_V, bound - 64, counts.other_V)
    assert coverage(smaller, counts.supervised_V) < 0.9
    assert best_size(counts, dear, 1.0) < vocab
    among = torch.arange(vocab) % 2 == 0
    with pytest.raises(UserError, match="all 500 tokens together cover"):
        best_size(counted(bunched_texts(40, vocab, 7), vocab, among), dear, 0.99, most=500)


def test_sizes_for_a_share_of_new_answers():
    counts = counted(bunched_texts(40, 1000, 7), 1000)
    for share in (0.3, 0.8, 0.95, 1.0):
        size = counts.size_for_expected(share)
        reached, before = counts.expected(torch.tensor([size, max(size - 1, 1)])).tolist()
        assert reached >= share - 1e-9 and (size == 1 or before < share)


def test_nothing_counted():
    nothing = torch.zeros(200, dtype=torch.int64)
    counts = count(nothing, nothing, [])
    assert best_size(counts, COST, 0.5) == 64 and counts.expected(torch.tensor([200])).tolist() == [0.0]


def test_sentences_hold_the_numbers():
    counts = counted(bunched_texts(40, 1000, 7), 1000)
    vocabulary = choose(counts.supervised_V, 256, counts.other_V)
    said = describe(vocabulary, counts)
    assert "256 of 1,000 tokens" in said and f"{coverage(vocabulary, counts.supervised_V):.2%}" in said
    assert f"{float(counts.expected(torch.tensor([256]))[0]):.1%} of new ones" in said
    assert "all 1,000" in describe(choose(counts.supervised_V, None), counts)
    said = arithmetic(counts, COST, 256)
    assert "7,000 + 32 x 256 weights, 15.2% of the target's 100,000" in said
    for size in (128, 256, 512, 1000):
        speed_up = float(COST.speed_up(size, float(counts.expected(torch.tensor([size]))[0])))
        assert f"{size:,} tokens {speed_up:.3f}" in said
