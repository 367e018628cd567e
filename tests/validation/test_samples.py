"""Accepted drafts are marked where they are, and nothing of the answer is lost or doubled."""

import torch

from drafttrain.types import Rollout
from drafttrain.validation.samples import PROMPT_CHARACTERS, Piece, marked, pieces, sample, token_origins


class Words:
    """Decodes token i to the i-th text."""

    def __init__(self, *texts: bytes):
        self.texts = texts

    def decode(self, ids, skip_special_tokens=False):
        return b"".join(self.texts[i] for i in ids).decode("utf-8", errors="replace")


def rollout(answer, accepted, cut=0):
    return Rollout("k", torch.tensor([99, *answer]), 1, accepted, cut, True, torch.tensor([], dtype=torch.int64))


def test_origins_of_the_prefill_drafts_and_the_targets_own():
    assert token_origins(rollout(range(7), [2, 0, 1])) == [False, True, True, False, False, True, False]


def test_origins_stop_at_the_cut():
    assert token_origins(rollout(range(3), [3], cut=2)) == [False, True, True]


def test_pieces_join_to_the_answer_and_meet_where_the_origin_changes():
    tokenizer = Words(b"I", b" am", b" a", b" fox", b".")
    found = pieces(tokenizer, rollout(range(5), [2, 0]))
    assert found == [Piece("I", False), Piece(" am a", True), Piece(" fox.", False)]


def test_a_character_split_across_a_cut_is_whole():
    snow = "☃".encode()
    tokenizer = Words(b"a", snow[:1], snow[1:], b"!")
    found = pieces(tokenizer, rollout(range(4), [1, 0]))
    assert "".join(p.text for p in found) == "a☃!"


def test_a_sample_shows_the_end_of_a_long_prompt_on_one_line():
    tokenizer = Words(b"I", b" am", b"x" * 400 + b"\n<why>?")
    shown = sample(tokenizer, Rollout("k", torch.tensor([2, 0, 1]), 1, [0], 0, True, torch.tensor([])))
    assert shown.prompt == "…" + "x" * (PROMPT_CHARACTERS - 7) + " &lt;why&gt;?"
    assert shown.answer == "I am"


def test_markup_is_escaped():
    assert marked([Piece("<b>", False), Piece("&", True)]) == "&lt;b&gt;<ins><b>&amp;</b></ins>"
