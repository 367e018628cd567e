"""A trimmed head: the logits that are left are the old ones, the maps are right, and what the target says stays the same."""

from dataclasses import replace

import pytest
import torch

from drafttrain.decoding.engine import generate
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.drafters.trim import choose_kept, trim
from drafttrain.drafters.vocabulary import choose_vocabulary, draft_cost
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.layouts import one_chat
from drafttrain.losses import Distillation
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Request
from drafttrain.vocab import Counts, DraftVocabulary, best_size, choose, count

OLD, DRAFTS = 240, 3


@pytest.fixture(scope="module")
def net(tiny_llama):
    """A drafter over 240 of the target's 320 tokens, all weights random."""
    g = torch.Generator().manual_seed(1)
    others = 3 + torch.randperm(tiny_llama.vocab - 3, generator=g)[: OLD - 3]
    vocabulary = DraftVocabulary(torch.cat([torch.arange(3), others]).sort().values, tiny_llama.vocab)
    torch.manual_seed(0)
    return Eagle3(taps=[0, 1, 3], depth=DRAFTS, draft_vocab=OLD).build(tiny_llama, vocabulary).eval()


def texts(target, number=12):
    g = torch.Generator().manual_seed(2)
    shares = 1.0 / torch.arange(1, target.vocab + 1).double()
    return [(shares.multinomial(40, replacement=True, generator=g), torch.arange(40) >= 9) for _ in range(number)]


def counts_for(target, among_V=None) -> Counts:
    said = texts(target)
    supervised_V, other_V = (
        sum(ids[mask if answer else ~mask].bincount(minlength=target.vocab) for ids, mask in said) for answer in (True, False)
    )
    return count(supervised_V, other_V, said, among_V)


@torch.no_grad()
def both_logits(target, old, new):
    """The two nets' logits over one text, old columns picked by token."""
    chat = one_chat(torch.cat([new.vocabulary.ids[:20], new.vocabulary.ids[-20:]]), prompt_len=2)
    features = target.read_packed(chat, old.needs.taps)
    layout = new.layout(chat)
    found = []
    for net in (old, new):
        drafted = net.rows(chat, features, layout)
        found.append(net.logits(drafted.hidden_NH, drafted.prev_N))
    columns = [old.vocabulary.ids.tolist().index(token) for token in new.vocabulary.ids.tolist()]
    return found[0][:, columns], found[1]


@pytest.mark.parametrize("size", [64, 128, 0.5])
def test_logits_of_the_tokens_that_are_kept_are_bit_for_bit_the_old_ones(tiny_llama, net, size):
    kept = choose_kept(net, tiny_llama, counts_for(tiny_llama, net.vocabulary.t2d), size)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    new = trim(net, tiny_llama, kept)
    old_logits, new_logits = both_logits(tiny_llama, net, new)
    assert len(new_logits) > 60 and torch.equal(old_logits, new_logits)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    for name, value in new.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(value, before[name])
    assert new.config == replace(net.config, draft_vocab=len(kept.ids)) and torch.equal(new.speakable_V, kept.ids)
    for draft, token in enumerate(kept.ids.tolist()):
        assert draft + int(kept.d2t[draft]) == token and bool(kept.t2d[token])
    assert int(kept.t2d.sum()) == len(kept.ids)


def test_the_most_frequent_tokens_that_the_net_can_say_are_kept(tiny_llama, net):
    counts = counts_for(tiny_llama, net.vocabulary.t2d)
    kept = choose_kept(net, tiny_llama, counts, 50).ids.tolist()
    sayable = net.vocabulary.ids.tolist()
    assert len(kept) == 50 and set(kept) <= set(sayable) and set(tiny_llama.end_ids) <= set(kept)
    least = min(int(counts.supervised_V[token]) for token in kept if token not in tiny_llama.end_ids)
    assert all(int(counts.supervised_V[token]) <= least for token in sayable if token not in kept)


def test_a_share_is_one_of_all_training_answers(tiny_llama, net):
    """Tokens that the old head cannot say count against the share, too: the smallest multiple of 64 that covers it of everything said."""
    said = torch.cat([ids[mask] for ids, mask in texts(tiny_llama)])
    counts = counts_for(tiny_llama, net.vocabulary.t2d)
    covers = {n: float(choose_kept(net, tiny_llama, counts, n).t2d[said].float().mean()) for n in (64, 128, 192)}
    for percent in range(5, int(100 * covers[192]), 3):
        kept = choose_kept(net, tiny_llama, counts, percent / 100)
        assert len(kept.ids) == next(n for n, share in covers.items() if share >= percent / 100)
    with pytest.raises(UserError, match=r"asks to cover 99.90% .* cover \d\d\.\d\d%"):
        choose_kept(net, tiny_llama, counts, 0.999)


def test_the_best_size_of_a_trained_head(tiny_llama, net, monkeypatch):
    """Of the multiples of 64 up to the old head's size; cost by the parameters of the very nets, whose taps are fused once a round."""
    counts = counts_for(tiny_llama, net.vocabulary.t2d)
    cost = draft_cost(net.config, tiny_llama)
    trained, fused = sum(p.numel() for p in net.parameters()), net.fc.weight.numel()
    assert cost.outside + cost.per_token * OLD == pytest.approx(trained - fused + fused / DRAFTS)
    assert (cost.per_token, cost.drafts) == (32, DRAFTS)
    read = sum(p.numel() for name, p in tiny_llama.model.named_parameters() if "embed_tokens" not in name)
    assert cost.target == read
    free, dear = (replace(cost, per_token=h) for h in (0, 5_000))
    for asked, wanted in ((dear, 64), (free, OLD)):
        monkeypatch.setattr("drafttrain.drafters.trim.draft_cost", lambda config, target, asked=asked: asked)
        assert best_size(counts, asked, 0.0, OLD) == wanted
        if wanted == OLD:
            with pytest.raises(UserError, match="best means 240 tokens, but the trained head has 240"):
                choose_kept(net, tiny_llama, counts, "best")
        else:
            assert len(choose_kept(net, tiny_llama, counts, "best").ids) == wanted


def test_what_a_recipe_asks_for_before_training(tiny_llama):
    """`choose_vocabulary` is `choose` at the size asked for, and at the optimum of this drafter's own cost."""
    counts = counts_for(tiny_llama)
    asked = Eagle3(taps=[0, 1, 3], depth=DRAFTS, draft_vocab=100)
    vocabulary, [line] = choose_vocabulary(asked, tiny_llama, counts)
    assert torch.equal(vocabulary.ids, choose(counts.supervised_V, 100, counts.other_V, always=tiny_llama.end_ids).ids)
    assert line.startswith("draft vocabulary: 100 of 320 tokens")
    best, [_, line] = choose_vocabulary(replace(asked, draft_vocab="best"), tiny_llama, counts)
    size = best_size(counts, draft_cost(asked, tiny_llama))
    assert len(best.ids) == size and f"32 x {size} weights" in line and "expected speed-up with 3 drafts" in line


def test_the_target_says_the_same_with_a_trimmed_drafter(tiny_llama, net, tmp_path):
    """In memory, saved and loaded, exported and reloaded: plain output, and the same rounds from all three."""
    requests = [Request(f"r{i}", tuple(range(5 + i, 12 + 2 * i)), 30) for i in range(4)]
    plain = {r.key: r for r in generate(tiny_llama, requests, slots=2)}
    said = torch.cat([r.answer for r in plain.values()])
    sayable = DraftVocabulary(torch.cat([said, torch.arange(160)]).unique(), tiny_llama.vocab)
    torch.manual_seed(0)
    whole = Eagle3(taps=[0, 1, 3], depth=DRAFTS, draft_vocab=len(sayable.ids)).build(tiny_llama, sayable)
    teach(tiny_llama, whole, plain.values())
    chats = [(r.ids, torch.arange(len(r.ids)) >= r.prompt_len) for r in plain.values()]
    supervised_V = said.bincount(minlength=tiny_llama.vocab)
    counts = count(supervised_V, torch.zeros_like(supervised_V), chats, sayable.t2d)
    small = trim(whole, tiny_llama, choose_kept(whole, tiny_llama, counts, int(0.8 * len(said.unique()))))
    save_drafter(tmp_path / "best", small, small.config, tiny_llama.identity, {})
    export_drafter(small, tiny_llama, tmp_path / "export", ExportConfig(dtype="float32"), None)
    rounds = []
    for drafter in (small, load_drafter(tmp_path / "best", tiny_llama)[0], load_export(tmp_path / "export", tiny_llama), whole):
        spoken = list(generate(tiny_llama, requests, proposer=ChainProposer(drafter, DRAFTS), slots=2))
        assert all(torch.equal(r.ids, plain[r.key].ids) for r in spoken)
        rounds.append({r.key: r.accepted for r in spoken})
    assert rounds[0] == rounds[1] == rounds[2]
    small_sum, whole_sum = (sum(map(sum, found.values())) for found in (rounds[0], rounds[3]))
    assert 5 < small_sum < whole_sum


def teach(target, net, rollouts, steps=40):
    """A few steps on these very answers, so that drafts get accepted."""
    optimizer, objective = torch.optim.AdamW(net.parameters(), lr=5e-3), Distillation()
    read = []
    for rollout in rollouts:
        chat = one_chat(rollout.ids, rollout.prompt_len)
        read.append((chat, target.read_packed(chat, net.needs.taps), net.layout(chat)))
    for _ in range(steps):
        for chat, features, layout in read:
            drafted = net.rows(chat, features, layout)
            terms, _ = objective.terms(drafted, net.logits, TargetTeacher(target, net), DRAFTS)
            optimizer.zero_grad()
            sum(t.sum / t.count.clamp(min=1) for t in terms.values()).backward()
            optimizer.step()
    net.eval()


@pytest.mark.parametrize("size", [OLD, OLD + 10, None])
def test_a_head_never_grows(tiny_llama, net, size):
    with pytest.raises(UserError, match="the trained head has 240: trimming only takes tokens away"):
        choose_kept(net, tiny_llama, counts_for(tiny_llama, net.vocabulary.t2d), size)


def test_coverage_that_is_asked_for_is_held(tiny_llama, net):
    with pytest.raises(UserError, match=r"least_coverage asks for 90.0%"):
        choose_kept(net, tiny_llama, counts_for(tiny_llama, net.vocabulary.t2d), 40, least_coverage=0.9)


def test_refused_vocabularies(tiny_llama, net, monkeypatch):
    end = tiny_llama.end_ids[0]
    rest = net.vocabulary.ids[net.vocabulary.ids != end]
    with pytest.raises(UserError, match=rf"without the end-of-turn tokens \[{end}\]"):
        trim(net, tiny_llama, DraftVocabulary(rest[:100], tiny_llama.vocab))
    unsayable = (~net.vocabulary.t2d).nonzero()[:1, 0]
    with pytest.raises(UserError, match=rf"cannot say 1 of the tokens .*such as {int(unsayable)}"):
        trim(net, tiny_llama, DraftVocabulary(torch.cat([net.vocabulary.ids[:50], unsayable]).sort().values, tiny_llama.vocab))
    monkeypatch.setattr(tiny_llama, "end_ids", tuple(net.vocabulary.ids[:5].tolist()))
    with pytest.raises(UserError, match="no room for the 5 end-of-turn tokens"):
        choose_kept(net, tiny_llama, counts_for(tiny_llama, net.vocabulary.t2d), 4)


@pytest.mark.parametrize(
    "config", [Hydra(heads=2), Hydra(heads=2, own_heads=True), Eagle3(taps=[1], depth=2, head_rank=6)], ids=str
)
def test_any_head_says_what_it_said_of_fewer_tokens(tiny_llama, config):
    """A head of the target's, one for each depth, and a factored one: the logits that are left are those of before."""
    torch.manual_seed(0)
    whole = config.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab)).eval()
    kept = DraftVocabulary(torch.arange(tiny_llama.vocab)[::3].unique(), tiny_llama.vocab)
    kept = DraftVocabulary(torch.cat([kept.ids, torch.tensor(tiny_llama.end_ids)]).unique(), tiny_llama.vocab)
    less = trim(whole, tiny_llama, kept)
    hidden_NH = torch.randn(5, whole.shape.hidden * (2 if getattr(config, "own_heads", False) else 1))
    prev_N = torch.zeros(5, dtype=torch.long)
    torch.testing.assert_close(less.logits(hidden_NH, prev_N), whole.logits(hidden_NH, prev_N)[:, kept.ids])
    assert less.config.draft_vocab == len(kept.ids) and torch.equal(less.speakable_V, kept.ids)
