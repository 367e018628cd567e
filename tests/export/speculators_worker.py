"""Run with the speculators library on the path: its own classes load exported folders and compute their drafts. Nothing of drafttrain is imported.

    python speculators_worker.py SITE WORK      SITE holds the library; WORK is a torch file with a list of cases, which gets the answers

Each case has `folder`, the text `ids` [T], what the target hands over of it (`taps` [T, A * D]), the `anchor`, a place in the text, and the number of
`drafts` K. Its answers: `logits` [K, Vd] behind the anchor, -inf for what is no candidate; `sure` [K] where there is a confidence; `class`; `left`,
the tensors of the file that the library has not, or has otherwise, and those that it would save and the file has not.

The forward passes are the library's, up to the loss: what goes into that is kept. Letters: T tokens, A taps, D width, Vd draft vocabulary.
"""

import sys

sys.path.insert(0, sys.argv[1])

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def load(folder):
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config).float().eval()


def left_over(model, folder):
    """Names in which the file and the model differ; the library's own list says what it does not save."""
    file, own = load_file(folder + "/model.safetensors"), model.state_dict()
    unlike = set(file) ^ (set(own) - set(model._keys_to_ignore_on_save))
    return sorted(unlike | {name for name in set(file) & set(own) if not torch.equal(own[name].to(file[name].dtype), file[name])})


def what_the_loss_gets(model, **inputs):
    """The forward pass, with a loss that only keeps what it is given."""
    module, kept = sys.modules[type(model).__module__], {}

    def keep(*args, **named):
        kept.update(named, positional=args)
        return torch.zeros(()), {}

    plain, module.compute_metrics = module.compute_metrics, keep
    model(**inputs)
    module.compute_metrics = plain
    return kept


def eagle3(model, ids, taps, document, at, drafts):
    heard = []
    model.lm_head.register_forward_hook(lambda module, args, output: heard.append(output[0]))
    model(hidden_states=taps[:, :-1], input_ids=ids[:, 1:], document_ids=document[:, 1:], ttt_steps=drafts)
    return torch.stack([step[at - 1] for step in heard]), None


def peagle(model, ids, taps, document, at, drafts):
    """Drafts begin at places whose successors count; a ratio above any share keeps all of them at all depths."""
    counts = torch.zeros_like(ids[:, 1:])
    counts[0, at : at + drafts + 1] = 1
    kept = what_the_loss_gets(
        model, hidden_states=taps[:, :-1], input_ids=ids[:, 1:], document_ids=document[:, 1:], loss_mask=counts, num_depths=drafts,
        verifier_last_hidden_states=torch.zeros(1, ids.shape[1] - 1, model.hidden_size), down_sample_ratio=100.0,
    )  # fmt: skip
    mine = kept["anchor_pos"] == at - 1
    assert kept["depth"][mine].tolist() == list(range(drafts))
    return kept["logits"][0][mine], None


def block(model, ids, taps, document, at, drafts):
    counts = torch.zeros_like(ids)
    counts[0, at] = 1
    width = taps.shape[-1] // len(model.target_layer_ids)
    inputs = {
        "hidden_states": taps, "input_ids": ids, "loss_mask": counts, "document_ids": document, "max_anchors": 1,
        "verifier_last_hidden_states": torch.zeros(1, ids.shape[1], width),
    }  # fmt: skip
    first = 0 if model.config.sample_from_anchor else 1
    if model.config.speculators_model_type == "dflash2":
        return walked(model, inputs, first), None
    given = what_the_loss_gets(model, **inputs)["positional"]
    sure = given[2] if model.config.speculators_model_type == "dspark" else None
    return given[0][0, first:], None if sure is None else sure[0, first:]


def walked(model, inputs, first):
    """Scores of the candidates that the library would choose among when it drafts."""
    selector, asked = model.candidate_selector, []
    plain = selector.score_candidates
    selector.score_candidates = lambda *args: asked.append(args) or plain(*args)
    what_the_loss_gets(model, **inputs)
    selector.score_candidates = plain
    unary, hidden, before, _ = asked[0]
    tokens, scores = selector.select(unary, hidden, before)
    return torch.full_like(unary, -torch.inf).scatter(-1, tokens, scores)[0, first:]


DRAFTERS = {"eagle3": eagle3, "peagle": peagle}


@torch.no_grad()
def answer(case):
    model = load(case["folder"])
    ids = case["ids"][None]
    draft = DRAFTERS.get(model.config.speculators_model_type, block)
    case["logits"], case["sure"] = draft(model, ids, case["taps"][None], torch.zeros_like(ids), case["anchor"], case["drafts"])
    case["class"], case["left"] = type(model).__name__, left_over(model, case["folder"])


work = torch.load(sys.argv[2])
for each in work:
    answer(each)
torch.save(work, sys.argv[2])
