"""How the tests of block drafters' exports compare: a drafter of ours against a plain reference, on the drafts of one block."""

from types import SimpleNamespace

import torch

from drafttrain.commands.drafts import load_draft
from drafttrain.decoding.engine import generate
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.save import save_drafter
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.types import Request

from .test_eagle3 import PROMPT, hf_hidden_states, text
from .test_eagle_medusa import make_net, ours


def exported(target, folder, asked, config, draft_vocab=None, dtype="float32"):
    """A drafter with random weights and its export."""
    net = make_net(target, config, draft_vocab)
    made = export_drafter(net, target, folder, ExportConfig(dtype=dtype, format=asked), None)
    drafts = net.deepest
    sequences = text(net, PROMPT + drafts + 1)
    return SimpleNamespace(
        net=net, made=made, sequences=sequences, drafts=drafts, folder=folder, anchor=int(sequences.ids_BT[0, PROMPT]),
        taps=lambda layers: hf_hidden_states(target, sequences.ids_BT, layers)[:PROMPT],
    )  # fmt: skip


def both_faces(case, target, tokens):
    """Our logits [K, V] at the same anchor by training and by decoding, behind the tokens of a chain."""
    case.sequences.ids_BT[0, PROMPT + 1 : PROMPT + 1 + case.drafts] = torch.tensor(tokens)
    return ours(case.net, target, case.sequences, case.drafts)


class Remembering(ChainProposer):
    """Keeps what it proposes."""

    def propose(self, *args):
        found = super().propose(*args)
        self.said = [*getattr(self, "said", []), found.tokens_BN.clone()]
        return found


def all_drafts(net, target) -> tuple[list, list]:
    """Every draft of some prompts, and the answers that came of them."""
    requests = [Request(f"p{i}", tuple(range(5 + i, 14 + 2 * i)), 12) for i in range(3)]
    proposer = Remembering(net, net.deepest)
    rollouts = sorted(generate(target, requests, proposer=proposer, slots=3), key=lambda rollout: rollout.key)
    return [said.tolist() for said in proposer.said], [rollout.ids.tolist() for rollout in rollouts]


def saved_and_exported_draft_alike(case, target, folder) -> None:
    """Both through the loader of `validate`: what training saved and what was exported; and the answers are plain decoding's."""
    save_drafter(folder, case.net, case.net.config, target.identity, {})
    saved, served = (all_drafts(load_draft(place, target), target) for place in (folder, case.folder))
    assert saved == served and len(saved[0]) > 3
    requests = [Request(f"p{i}", tuple(range(5 + i, 14 + 2 * i)), 12) for i in range(3)]
    plain = sorted(generate(target, requests, slots=3), key=lambda rollout: rollout.key)
    assert served[1] == [rollout.ids.tolist() for rollout in plain]
