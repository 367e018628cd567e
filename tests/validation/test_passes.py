"""What must hold of every prompt, where two answers part, and the arithmetic of speed: on hand-made rollouts."""

from types import SimpleNamespace

import pytest
import torch

from drafttrain.decoding.measure import check_counts, count
from drafttrain.target.target import own_attention
from drafttrain.types import Request, Rollout
from drafttrain.validation import cost as cost_module
from drafttrain.validation.cost import Cost, measure_cost
from drafttrain.validation.passes import Difference, Pass, differences, logit_gap


def rollout(answer, accepted=(), cut=0, key="k", beyond=()):
    ids = torch.tensor([7, 8, *answer])
    return Rollout(key, ids, 2, list(accepted), cut, True, torch.tensor(beyond, dtype=torch.int64))


def test_counts_that_add_up_pass():
    check_counts("drafter", [rollout(range(6), [2, 1]), rollout(range(3), [1, 2], cut=3), rollout([5])], drafts=3)


@pytest.mark.parametrize("wrong", [rollout(range(6), [2, 0]), rollout(range(6), [2, 1], cut=1), rollout(range(2))])
def test_counts_that_do_not_add_up_are_an_error_that_names_the_prompt(wrong):
    with pytest.raises(RuntimeError, match="drafter, prompt k: 1 \\+ sum"):
        check_counts("drafter", [rollout(range(6), [2, 1], key="good"), wrong], drafts=3)


def test_more_accepted_than_drafted_is_an_error():
    with pytest.raises(RuntimeError, match="accepted 4 of 3"):
        check_counts("drafter", [rollout(range(6), [4])], drafts=3)


def test_differences_find_the_first_position_and_ended_answers():
    plain = [rollout([1, 2, 3], key="a"), rollout([1, 2, 3], key="b"), rollout([1, 2], key="c"), rollout([1, 2, 3], key="d")]
    other = [rollout([1, 2, 3], key="a"), rollout([1, 9, 8], key="b"), rollout([1, 2, 3], key="c"), rollout([1], key="d")]
    assert differences("lookup", plain, other) == [
        Difference("lookup", "b", 1, 2, 9),
        Difference("lookup", "c", 2, None, 3),
        Difference("lookup", "d", 1, 2, None),
    ]


def test_a_difference_reads_as_a_sentence():
    text = str(Difference("drafter", "p1", 4, 12, None))
    assert text == "drafter, prompt p1, answer position 4: plain decoding has token 12, drafter has nothing (it had ended)"


def test_overrun_tokens_count_as_decoded_but_not_as_emitted():
    p = Pass("plain", [rollout(range(10), beyond=[1, 2, 3]), rollout(range(4), beyond=[1])], 2.0, count([], 3))
    assert p.tokens == 14
    assert p.tokens_per_second == 9.0


def test_logit_gap_is_the_models_own(tiny_llama):
    answer = [11, 12, 13]
    ids = torch.tensor([[7, 8, 11, 12]])
    with own_attention(tiny_llama.model):
        logits_V = tiny_llama.model(input_ids=ids, use_cache=False).logits[0, -1]
    gap = logit_gap(tiny_llama, rollout(answer), Difference("drafter", "k", 2, 13, 40))
    assert gap == pytest.approx(float(logits_V[13] - logits_V[40]), abs=1e-4)
    assert logit_gap(tiny_llama, rollout(answer), Difference("drafter", "k", 3, None, 40)) is None


def test_cost_facts_hold_tau_over_c():
    facts = Cost(batch=8, tokens=24, plain_step_seconds=0.1, round_seconds=0.2).facts(tau=1.5)
    assert facts["ratio"] == pytest.approx(2.0)
    assert facts["implied_speedup"] == pytest.approx(0.75)
    assert [a["implied_speedup"] for a in facts["assumed"]] == pytest.approx([1.5 / 1.1, 1.5 / 1.2])


def test_cost_takes_the_prefill_off_and_divides_by_the_rounds_of_one_row(monkeypatch):
    """A clock that charges 5 s for a prefill, 1 s for a plain step and 3 s for a round of two tokens must give c = 3."""

    def run(engine, requests, overrun=0):
        limit = requests[0].limit
        accepted = [0] * (limit - 1) if engine.proposer is None else [1] * (limit // 2)
        cut = 1 + sum(a + 1 for a in accepted) - limit
        answers = [rollout(range(limit), accepted, cut=cut, key=r.key) for r in requests]
        return answers, 5 + len(accepted) * (1 if engine.proposer is None else 3)

    monkeypatch.setattr(cost_module, "run", run)
    monkeypatch.setattr(cost_module, "Engine", lambda target, proposer, slots: SimpleNamespace(proposer=proposer))
    cost = measure_cost(None, Request("p", (1, 2), 100), object, slots=4, tokens=24)
    assert (cost.batch, cost.plain_step_seconds, cost.round_seconds, cost.ratio) == (4, 1.0, 3.0, 3.0)


def test_cost_needs_two_tokens():
    assert measure_cost(None, Request("p", (1, 2), 100), object, slots=4, tokens=1) is None
