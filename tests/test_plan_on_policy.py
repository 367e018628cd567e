"""What `plan` counts of on-policy recipes, against what training then makes and keeps, and against an engine's own buffers."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from drafters.test_faces import DRAFTERS as EVERY_DRAFTER
from on_policy_forms import FORMS, SMALL
from on_policy_forms import make_run as make_unmasked_run
from planning import line, on_policy_planner, trainer_of
from tiny_run import ragged_chats, start, write_store
from torch.utils._pytree import tree_leaves

from drafttrain.commands.plan import outline
from drafttrain.commands.plan_engine import bytes_as, engine_buffers
from drafttrain.commands.plan_on_policy import Prompts, most_elements, most_rows
from drafttrain.data.packing import pack
from drafttrain.data.shards import Chat
from drafttrain.data.stream import DataConfig
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import save_drafter
from drafttrain.files import human_bytes
from drafttrain.losses import Distillation
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.tasks import train as training
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.rollouts import Replayer, Roller
from drafttrain.topology import Topology
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary


@pytest.fixture
def planned(tmp_path, target_folders, capsys):
    return on_policy_planner(tmp_path, target_folders("llama"), capsys)


@pytest.fixture
def began(tmp_path, tiny_llama, target_folders):
    return trainer_of(tmp_path, tiny_llama, target_folders("llama"))


def numbers(text: str, pattern: str) -> list[int]:
    [found] = re.findall(pattern, text)
    return [int(number.replace(",", "")) for number in found]


# ---- arithmetic ----------------------------------------------------------------------------------------------------------------


def test_rollouts_and_bytes_are_those_of_a_training(planned, began, monkeypatch, capsys):
    """Counted in the training itself: prompts answered, rollouts learnt from, shapes of its micro-batches, bytes it asks the disk for."""
    answered, learnt, shapes, space, engines = [], [], [], [], []
    answer, window = Roller.answer, Replayer.window

    def spied_answer(roller, prompts):
        answered.append(len(prompts))
        engines.append(roller.engine)
        return answer(roller, prompts)

    def spied_window(replayer, step):
        made = window(replayer, step)
        learnt.append(len(replayer._schedule[1][step % replayer.plan.config.every]))
        shapes.extend(tuple(micro.sequences.ids_BT.shape) for micro in made)
        return made

    monkeypatch.setattr(Roller, "answer", spied_answer)
    monkeypatch.setattr(Replayer, "window", spied_window)
    monkeypatch.setattr(training, "require_space", lambda folder, size, what: space.append((what, size)))
    sections = {"data": {"length": 48, "rows": 2}, "trainer": {"max_steps": 5, "accumulate_grad_batches": 3}}
    _, lines = planned(**sections)
    assert began(objective=OnPolicyDistillation(), **sections) == ""
    trained = capsys.readouterr().out
    _, behind = planned(**sections)

    assert line(lines, "rollouts/step: ").startswith(
        "rollouts/step: 1 process x 3 accumulations x 1 or 2 rollouts = 4, of the newest 16; "
    )
    made, tokens, used = numbers(
        line(lines, "8 prompts are answered before every 2 steps, "),
        r"in 5 steps ([\d,]+) rollouts of at most ([\d,]+) tokens; ([\d,]+) are",
    )
    assert (made, used) == (sum(answered), sum(learnt)) == (24, 20) and tokens == 24 * SMALL["max_tokens"]
    assert "passes over the prompts are known after data_prep" in lines
    rollouts, prompts = numbers(line(behind, "passes over the prompts: "), r": (\d+) rollouts answer (\d+) prompts")
    assert rollouts == made and f" of {prompts} prompts are answered every 2 steps" in trained
    assert line(behind, "passes over the prompts: ").endswith(f"{made / prompts:.2f} times")
    most, length = numbers(line(behind, "rollouts/step: "), r"at most (\d+) rows x (\d+) tokens")
    assert max(shapes) == (most, length) == (2, 48)
    [size] = [size for what, size in space if "rollouts" in what]
    assert line(behind, "disk, rollouts: ").startswith(
        f"disk, rollouts: at most {human_bytes(size / 2)} beside a checkpoint, and twice that"
    )
    # Half as many come new as are kept.
    assert line(behind, "memory, each process: ").startswith(
        f"memory, each process: at most {human_bytes(size / 2)} for its rollouts, and {human_bytes(size / 4)} more while prompts are answered"
    )
    batch = engines[0]._rounds.batch
    answers = (
        f"caches and records of {batch.rows} answers (on_policy.slots) x {batch.capacity} positions {human_bytes(held_by(batch))}"
    )
    assert f" + {answers} = " in line(behind, "device (cpu)")


def test_processes_share_rollouts_and_their_bytes(planned, monkeypatch):
    alone = planned()[1]
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    _, lines = planned()
    assert line(lines, "rollouts/step: ").startswith("rollouts/step: 2 processes x 1 accumulations x 2 rollouts = 4, ")
    assert line(lines, "disk, rollouts: ") == line(alone, "disk, rollouts: ")
    assert "caches and records of 4 answers" in line(alone, "device ") and "caches and records of 4 answers" in line(
        lines, "device "
    )
    assert "records of 8 answers" in line(planned(on_policy={"rollouts": 16, "slots": 64})[1], "device ")


FEW = {**SMALL, "rollouts": 2, "batch": 2, "buffer": 2, "max_tokens": 500}


@pytest.mark.parametrize("sections", [{"on_policy": FEW}, {"data": {"length": 12}}], ids=["target", "row"])
def test_prompts_that_have_no_room_are_left_out_in_the_words_of_training(planned, began, capsys, sections):
    assert began(**{"objective": OnPolicyDistillation(), "trainer": {"max_steps": 2}} | sections) == ""
    [said] = [each for each in capsys.readouterr().out.splitlines() if "left out" in each]
    assert said in planned(**sections)[1]


def test_a_prompt_that_several_chats_share_is_one(planned, began, tmp_path, tiny_llama, capsys):
    chats = ragged_chats(23, len(tiny_llama.tokenizer))
    again = [Chat(f"again-{chat.key}", chat.ids, chat.supervised) for chat in chats]
    write_store(tmp_path / "tiny" / "data" / "train", [*chats, *again], tiny_llama.identity)
    _, lines = planned()
    assert began(objective=OnPolicyDistillation(), trainer={"max_steps": 2}) == ""
    [prompts] = re.findall(r"8 of (\d+) prompts are answered", capsys.readouterr().out)
    assert f" rollouts answer {prompts} prompts " in line(lines, "passes over the prompts: ") and int(prompts) <= 23


def test_no_prompt_with_room_is_refused_as_training_does(planned, began):
    refused = began(SMALL | {"max_tokens": 511})
    assert "has no prompt that leaves room for" in refused
    assert planned(code=2, on_policy={"max_tokens": 511})[1][-1] == f"error: {refused}"


@pytest.mark.parametrize("name", FORMS)
def test_no_micro_batch_scores_more_than_is_said(tmp_path, tiny_llama, target_folders, monkeypatch, name):
    """A drafter that has learnt nothing has most drafts rejected: as many rounds as there can be."""
    drafter, on_policy, objective = FORMS[name]
    found, window = [], Replayer.window

    def spied(replayer, step):
        made = window(replayer, step)
        found.extend(len(micro.layout.depth_N) for micro in made)
        return made

    monkeypatch.setattr(Replayer, "window", spied)
    make_unmasked_run(tmp_path / "run", tiny_llama)
    start(tmp_path / "run", target_folders("llama"), drafter=drafter, on_policy=SMALL | on_policy, objective=objective)
    recipe = SimpleNamespace(on_policy=OnPolicyConfig(**SMALL | on_policy), trainer={}, objective=objective or Distillation())
    most = most_elements(recipe, Topology(), drafter.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab)).needs.depth)
    assert max(found) <= most
    if on_policy["replay"] == "rounds" and drafter.draft_vocab is None:
        assert max(found) > most / 2


def test_logits_are_those_of_what_a_micro_batch_scores(planned):
    """4 rollouts of 12 tokens, a round for each: one verified token and 2 drafts, over 200 words; or the stream of verified tokens alone."""
    accepted = {"init_args": {"rejected_weight": 0.0}}
    for objective, on_policy, elements in (
        ({}, {}, 4 * 12 * 3),
        ({}, {"replay": "first_rejection"}, 4 * 12),
        (accepted, {}, 4 * 12),
    ):
        said = line(planned(objective=objective, on_policy=on_policy)[1], "device, on top: ")
        assert said.endswith(f"one copy of a micro-batch's logits is at most {human_bytes(elements * 200 * 4)}")
    chunked = line(planned(objective={"init_args": {"chunk": 16}})[1], "device, on top: ")
    assert chunked.endswith(f"one copy of 16 elements' (objective.init_args.chunk) logits is at most {human_bytes(16 * 200 * 4)}")


def test_rows_of_a_micro_batch_are_bounded():
    draw, tight = random.Random(0), 0
    for _ in range(500):
        longest, limit, length, rows = draw.randint(1, 30), draw.randint(2, 30), draw.randint(3, 120), draw.randint(1, 4)
        batch, accumulate = draw.randint(1, 24), draw.randint(1, 3)
        config = OnPolicyConfig(batch=batch, rollouts=batch, buffer=batch, max_tokens=limit)
        trainer = {"accumulate_grad_batches": accumulate}
        recipe = SimpleNamespace(on_policy=config, data=DataConfig(length=length, rows=rows), trainer=trainer)
        lengths = [min(length, draw.randint(1, longest) + draw.randint(1, limit)) for _ in range(-(-batch // accumulate))]
        packed = -(-len(pack(lengths, length, open_rows=len(lengths))) // rows) * rows
        said = most_rows(recipe, Topology(), Prompts(longest, longest))
        assert packed <= said
        tight += packed == said
    assert tight > 100


# ---- bytes ---------------------------------------------------------------------------------------------------------------------


def held_by(batch) -> int:
    """Bytes of all that a batch keeps from round to round: storages, wherever they hang."""
    parts = [
        batch.cache.addresses.stacks,
        batch.proposer.hidden_BH,
        batch.tokens_BM,
        batch.length_B,
        batch.stream_B,
        batch.live_B,
        batch.said_BX,
    ]
    parts += [vars(record) for record in (batch.features, batch.round_buffers, batch.proposer.state) if record is not None]
    found = [leaf.untyped_storage() for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def test_positions_are_those_of_an_engine_whatever_the_length(planned, tiny_llama):
    """Across a step from 64 slots to 128, which drafts move."""
    recipe, _ = planned()
    sketch, _ = outline(recipe)
    full, seen = DraftVocabulary.full(320), set()
    for depth in (1, 4):
        config = Eagle3(taps=[0, 1, 3], depth=depth, draft_vocab=None)
        with torch.device("meta"):
            outlined = config.build(sketch, full)
        for limit in range(2, 16):
            engine = Engine(
                tiny_llama,
                proposer=ChainProposer(config.build(tiny_llama, full), depth),
                slots=2,
                keep_features=True,
                taps=(0, 1, 3),
            )
            list(engine.generate([Request("a", tuple(range(3, 50)), limit)]))
            slots, _ = engine_buffers(sketch, outlined, depth, 1, 47 + limit, False)
            assert slots == engine._rounds.batch.capacity
            seen.add((depth, slots))
    assert len(seen) == 4


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_an_outline_holds_what_an_engine_holds(planned, targets, target_folders, architecture, rounds, name):
    recipe, _ = planned(target={"path": str(target_folders(architecture))})
    target, (sketch, _) = targets(architecture), outline(recipe)
    config, vocabulary = EVERY_DRAFTER[name], DraftVocabulary(torch.arange(0, 320, 2), 320)
    net = config.build(target, vocabulary)
    with torch.device("meta"):
        outlined = config.build(sketch, vocabulary)
    drafts = min(2, net.needs.depth)
    requests = [Request(str(n), tuple(range(3, 3 + n)), 9) for n in (3, 20, 7, 5)]
    engine = Engine(
        target, proposer=ChainProposer(net, drafts), slots=3, taps=net.needs.taps, keep_features=True, keep_rounds=rounds
    )
    list(engine.generate(requests))
    batch = engine._rounds.batch
    slots, buffers = engine_buffers(sketch, outlined, drafts, 3, 20 + 9, rounds)
    assert slots == batch.capacity
    assert bytes_as(buffers, 4) == held_by(batch)
    whole = sum(x.nbytes for x in buffers if not x.is_floating_point())
    assert bytes_as(buffers, 2) == (held_by(batch) + whole) / 2


def test_the_served_copy_has_the_targets_type(planned):
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        _, lines = planned(target={"dtype": dtype})
        trained = int(re.match(r"parameters: ([\d,]+) trained", line(lines, "parameters: "))[1].replace(",", ""))
        assert f" + served copy of the drafter {human_bytes(size * trained)} + caches" in line(lines, "device (cpu)")
    assert "served copy" not in line(planned(task="distill")[1], "device (cpu)")


def test_a_drafter_whose_tau_is_known_tells_the_likely_bytes(planned, tmp_path, tiny_llama):
    recipe, lines = planned()
    config = recipe.drafter
    net = config.build(tiny_llama, DraftVocabulary(torch.arange(40, 240), tiny_llama.vocab))
    for facts, said in (({}, ""), ({"held_out": {"tau": 2.5}}, "; at tau 2.50 of checkpoint.start about ")):
        save_drafter(tmp_path / "trained", net, config, tiny_llama.identity, facts)
        _, lines = planned(checkpoint={"start": str(tmp_path / "trained")}, on_policy={"from_random": False})
        assert said in line(lines, "rollouts are as large as that where every draft is rejected ")
        assert ("at tau" in line(lines, "rollouts are as large as that")) == bool(said)
    [(most,), (likely,)] = [
        re.findall(r"([\d.]+ kB)", each)[:1] for each in (line(lines, "disk, rollouts: "), line(lines, "rollouts are as"))
    ]
    assert 1 < float(most.split()[0]) / float(likely.split()[0]) < 2.5
    assert not [
        each
        for each in planned(on_policy={"replay": "text"}, objective={"class_path": "Distillation"})[1]
        if each.startswith("rollouts are")
    ]
