"""`drafttrain compare`: intervals against a plain loop over draws, tables against what was changed, and the command from a recipe to its JSON."""

import json
import shutil

import pytest
import torch
from drafters.test_faces import DRAFTERS, net_for
from drafters.test_published import PUBLISHED, source, write
from export.test_round_trip import DRAFTERS as ROUND_TRIP
from export.test_round_trip import net_for as full_net
from export.test_round_trip import why_not
from safetensors.torch import load_file, save_file
from test_cli import recipe_text
from tiny_run import make_run

from drafttrain.cli import main
from drafttrain.decoding.engine import generate
from drafttrain.decoding.measure import count
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.save import save_drafter
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.export.inspect import inspect_folder
from drafttrain.export.inspect_pair import config_differences, forms_note, names_fault, names_note, tensor_rows
from drafttrain.types import Request
from drafttrain.validation.compare import AT_ONCE, DRAWS, compare_tau, estimates

REQUESTS = [Request(f"p{i}", tuple(range(5 + i, 14 + 2 * i)), 16) for i in range(5)]


# ---- numbers -----------------------------------------------------------------------------------------------------------------


def test_intervals_equal_a_plain_loop_over_the_same_draws():
    """tau pooled over each draw, the ratio of both on one draw, and the 2.5th and 97.5th of them."""
    g = torch.Generator().manual_seed(3)
    rounds = torch.randint(5, 40, (9,), generator=g)
    a, b = (torch.stack([(rounds * share).long(), rounds], 1).double() for share in (1.7, 2.1))
    b[:, 0] += torch.arange(9)
    got = estimates(a, b)
    g = torch.Generator().manual_seed(0)
    drawn: list[list[float]] = [[], [], []]
    for _ in range(DRAWS // AT_ONCE):
        for chosen in torch.randint(9, (AT_ONCE, 9), generator=g).tolist():
            taus = [1 + sum(float(x[p, 0]) for p in chosen) / sum(float(x[p, 1]) for p in chosen) for x in (a, b)]
            for kept, value in zip(drawn, (*taus, taus[1] / taus[0]), strict=True):
                kept.append(value)
    for estimate, values in zip(got, drawn, strict=True):
        ordered = sorted(values)
        assert estimate.low == pytest.approx(ordered[int(0.025 * DRAWS)], abs=2e-3)
        assert estimate.high == pytest.approx(ordered[int(0.975 * DRAWS)], abs=2e-3)
    assert got[0].value == pytest.approx(float(1 + a[:, 0].sum() / a[:, 1].sum()))
    assert got[2].value == pytest.approx(got[1].value / got[0].value)


def test_what_is_common_to_both_does_not_widen_the_ratio():
    """B keeps a fifth more than A on every prompt, hard or easy: the ratio is sure where each tau is not."""
    easy = torch.tensor([[90.0, 30], [5, 30], [60, 30], [10, 30]], dtype=torch.float64)
    a, b, ratio = estimates(easy, easy + torch.tensor([6.0, 0], dtype=torch.float64))
    assert a.high - a.low > 1 and ratio.high - ratio.low < 0.15 and ratio.low > 1


def test_both_are_measured_as_the_engine_counts_alone(tiny_llama):
    nets = [net_for(tiny_llama, DRAFTERS[name]) for name in ("eagle3", "dflash")]
    found = compare_tau(tiny_llama, *nets, REQUESTS, drafts=3, slots=2)
    for net, estimate in zip(nets, (found.a, found.b), strict=True):
        alone = count(generate(tiny_llama, REQUESTS, proposer=ChainProposer(net, 3), slots=2), 3)
        assert estimate.value == pytest.approx(alone.tau) and estimate.low <= alone.tau <= estimate.high
    assert found.prompts == 5 and found.drafts == 3 and not found.unequal
    with pytest.raises(UserError, match="validate.drafts asks for 9 drafts"):
        compare_tau(tiny_llama, *nets, REQUESTS, drafts=9, slots=2)


def test_a_drafter_beside_itself_is_as_good(tiny_llama):
    net = net_for(tiny_llama, DRAFTERS["medusa"])
    ratio = compare_tau(tiny_llama, net, net, REQUESTS, drafts=3, slots=5).ratio
    assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)


# ---- configuration and tensors -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tiny_llama, tmp_path):
    """An export, and a copy of it that is changed in a few places."""
    export_drafter(net_for(tiny_llama, DRAFTERS["eagle3"]), tiny_llama, tmp_path / "a", ExportConfig(dtype="float32"), None)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["eagle_config"]["use_aux_hidden_state"] = None
    del config["norm_output"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0, "more": 1}))
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"] + torch.eye(32, 96) * 0.5
    tensors["norm.weight"] = tensors["norm.weight"][:16].clone()
    tensors["extra"] = tensors.pop("lm_head.weight").half()
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    return tmp_path / "a", tmp_path / "b"


def test_every_difference_and_nothing_else(pair):
    a, b = (inspect_folder(str(folder)) for folder in pair)
    assert config_differences(a, b) == [
        ("rope_theta", 10000.0, 7.0),
        ("eagle_config.use_aux_hidden_state", True, None),
        ("norm_output", False, None),
        ("more", None, 1),
    ]
    rows = {name: tuple(rest) for name, *rest in tensor_rows(a, b)}
    assert rows.keys() == a.folder.tensors.keys() | b.folder.tensors.keys()
    assert rows["fc.weight"] == ("[32, 96] float32", "[32, 96] float32", pytest.approx(0.5))
    assert rows["norm.weight"] == ("[32] float32", "[16] float32", None)
    assert rows["lm_head.weight"] == ("[256, 32] float32", "-", None) and rows["extra"] == ("-", "[256, 32] float16", None)
    assert all(
        gap == 0.0 for name, (_, _, gap) in rows.items() if name not in ("fc.weight", "norm.weight", "lm_head.weight", "extra")
    )


def test_numbers_that_are_not_finite_are_a_difference(pair):
    tensors = load_file(pair[1] / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, pair[1] / "model.safetensors")
    rows = tensor_rows(*(inspect_folder(str(folder)) for folder in pair))
    assert {name: gap for name, _, _, gap in rows}["fc.weight"] is None


def test_a_checkpoint_beside_an_export_is_compared_by_what_both_record(tiny_llama, tmp_path, capsys):
    net = net_for(tiny_llama, DRAFTERS["eagle3"])
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    other = net_for(tiny_llama, DRAFTERS["eagle3.1"])
    export_drafter(other, tiny_llama, tmp_path / "export", ExportConfig(), None)
    found = config_differences(*(inspect_folder(str(tmp_path / name)) for name in ("best", "export")))
    assert {name for name, _, _ in found} == {"init_args.fc_norm", "init_args.norm_output"}
    assert main(["compare", str(tmp_path / "best"), str(tmp_path / "export")]) == 0
    out = capsys.readouterr().out
    assert "init_args.fc_norm" in out and "fc_norm.0.weight" in out and "bfloat16" in out
    assert (
        "A: " in out and "a drafter as drafttrain's training saves it" in out and "(checkpoints/best)" not in out
    )  # last_drafter is one too


def test_shapes_in_our_own_config_are_left_to_the_tensors(tiny_llama, tmp_path):
    found = []
    for name in ("medusa", "medusa own heads"):
        export_drafter(net_for(tiny_llama, DRAFTERS[name]), tiny_llama, tmp_path / name, ExportConfig(format="native"), None)
        found.append(inspect_folder(str(tmp_path / name)))
    assert {name for name, _, _ in config_differences(*found)} == {"init_args.layers", "init_args.own_heads"}
    assert ("lm_head.weight", "-", "[256, 128] bfloat16", None) in tensor_rows(*found)


# ---- names ------------------------------------------------------------------------------------------------------------------


CARRIED = {"embed_tokens.weight", "lm_head.weight", "fc.bias", "d2t", "t2d"}
"""What a form may carry of the target's, of zeros, and of the vocabulary beside what was trained."""
FORMS = [
    (name, asked)
    for name in ROUND_TRIP
    for asked in ("vllm", "sglang", "speculators", "native")
    if not why_not(name, asked, "full", "llama")
]


@pytest.mark.parametrize(("name", "asked"), FORMS)
def test_every_weight_of_a_checkpoint_is_found_in_its_export_whatever_that_calls_it(tiny_llama, tmp_path, name, asked):
    """Against the net: the names are its own, the numbers equal, whichever is A."""
    net = full_net(tiny_llama, name, "full")
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(dtype="float32", format=asked), None)
    best, export = (inspect_folder(str(tmp_path / each)) for each in ("best", "export"))
    multiplied = {"lm_head.down.weight", "lm_head.up.weight"} if name == "eagle3 low-rank" and asked != "native" else set()
    for pair in ((best, export), (export, best)):
        rows = tensor_rows(*pair)
        assert {row[0] for row in rows if row[3] == 0} == net.state_dict().keys() - multiplied
        assert {row[0] for row in rows if row[3] != 0} <= CARRIED | multiplied
        assert names_fault(*pair) is None
        told = names_note(*pair) or ""
        assert bool(told) == any(key not in export.folder.tensors for key in net.state_dict().keys() - multiplied), told


def test_exports_in_two_forms_are_paired_and_a_changed_number_is_found_under_our_name(tiny_llama, tmp_path, capsys):
    net = net_for(tiny_llama, DRAFTERS["eagle3"])
    for asked in ("vllm", "speculators"):
        export_drafter(net, tiny_llama, tmp_path / asked, ExportConfig(dtype="float32", format=asked), None)
    weights = load_file(tmp_path / "speculators" / "model.safetensors")
    weights["layers.0.mlp.up_proj.weight"][0, 0] += 2
    save_file(weights, tmp_path / "speculators" / "model.safetensors")
    rows = {
        name: gap for name, _, _, gap in tensor_rows(*(inspect_folder(str(tmp_path / each)) for each in ("speculators", "vllm")))
    }
    assert rows.pop("midlayer.mlp.up_proj.weight") == pytest.approx(2) and rows.pop("embed_tokens.weight") is None
    assert rows.keys() == net.state_dict().keys() - {"midlayer.mlp.up_proj.weight"} | {"d2t", "t2d"} and not any(rows.values())
    main(["compare", str(tmp_path / "speculators"), str(tmp_path / "vllm")])
    lines = capsys.readouterr().out.splitlines()
    note = next(line for line in lines if line.startswith("note: tensors are told"))
    assert "A calls midlayer." in note and " layers.0." in note and "B calls" not in note
    [forms] = [
        place for place, line in enumerate(lines) if line.startswith("note: A and B are written in two forms (A: EAGLE-3, ")
    ]
    assert forms < next(place for place, line in enumerate(lines) if line.startswith("configuration "))


def test_two_forms_are_said_of_one_drafter_alone(tiny_llama, tmp_path):
    for name, asked in (("eagle3", "vllm"), ("medusa", "native"), ("eagle3", "native")):
        export_drafter(
            net_for(tiny_llama, DRAFTERS[name]), tiny_llama, tmp_path / f"{name}-{asked}", ExportConfig(format=asked), None
        )
    vllm, medusa, native = (inspect_folder(str(tmp_path / name)) for name in ("eagle3-vllm", "medusa-native", "eagle3-native"))
    assert "(A: drafttrain's own; B: EAGLE-3, the original's names)" in (forms_note(native, vllm) or "")
    assert not any(forms_note(vllm, other) for other in (vllm, medusa)) and forms_note(native, medusa) is None


def test_rows_that_a_token_map_lists_in_another_order_are_compared_by_token(tiny_llama, tmp_path, capsys):
    """A drafter of ours, and the same in vLLM's form, its tokens shuffled: equal but for the biases that this form leaves out, until a row is another."""
    config, make, _ = PUBLISHED["medusa of vllm"]
    net = source(tiny_llama, config)
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    config_json, tensors = make(net)
    write(tmp_path / "vllm", config_json, tensors)
    row = 7
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["lm_heads.1.weight"][row] += 2
    write(tmp_path / "changed", config_json, changed)
    order = torch.randperm(len(tensors["token_map"]), generator=torch.Generator().manual_seed(5))
    heads = {name: tensor[order] for name, tensor in tensors.items() if name.startswith("lm_heads.")}
    write(tmp_path / "again", config_json, tensors | heads | {"token_map": tensors["token_map"][order]})
    other = tensors["token_map"].clone()
    other[row] = next(token for token in range(320) if token not in other)
    write(tmp_path / "other", config_json, tensors | {"token_map": other})

    def gaps(a, b):
        rows = tensor_rows(*(inspect_folder(str(tmp_path / name)) for name in (a, b)))
        return {name: gap for name, _, _, gap in rows if "bias" not in name and gap != 0}

    for pair in (("best", "vllm"), ("vllm", "best"), ("vllm", "again"), ("vllm", "vllm")):
        assert gaps(*pair) == {}, pair
    assert gaps("best", "changed") == {"lm_head.weight": pytest.approx(2)}
    assert gaps("again", "changed") == {"lm_heads.1.weight": pytest.approx(2)}
    assert "d2t" in gaps("best", "other") and "d2t" in gaps("vllm", "other")
    main(["compare", str(tmp_path / "best"), str(tmp_path / "vllm")])
    assert "note: B lists the rows of the head in the order of its token_map; they are compared by" in capsys.readouterr().out


def test_where_names_tell_nothing_it_is_said_and_the_code_is_not_0(tiny_llama, tmp_path, capsys):
    """Medusa's own project and vLLM call every tensor differently, and neither as we do; of two classes nobody expects it."""
    for name in ("medusa", "medusa of vllm"):
        config, make, _ = PUBLISHED[name]
        write(tmp_path / name.replace(" ", "-"), *make(source(tiny_llama, config)))
    net = net_for(tiny_llama, DRAFTERS["hydra"])
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    assert main(["compare", str(tmp_path / "medusa"), str(tmp_path / "medusa-of-vllm")]) == 2
    assert "error: A and B name their tensors differently (such as 0.0.linear.bias and blocks." in capsys.readouterr().err
    main(["compare", str(tmp_path / "medusa"), str(tmp_path / "best")])
    assert "differently" not in "".join(capsys.readouterr())


# ---- the command -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny_llama, target_folders, tmp_path):
    """(flags, a checkpoint, an export of it, another drafter as somebody published it): a run with held-out prompts."""
    make_run(tmp_path / "runs" / "tiny", tiny_llama)
    (tmp_path / "prompts.jsonl").write_text("")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(target_folders("llama"), tmp_path / "prompts.jsonl"))
    net = net_for(tiny_llama, DRAFTERS["eagle3"])
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(dtype="float32"), None)
    config, make, _ = PUBLISHED["eagle3"]
    write(tmp_path / "published", *make(source(tiny_llama, config)))
    flags = ["--config", str(recipe), "--runs", str(tmp_path / "runs")]
    return flags, *(str(tmp_path / name) for name in ("best", "export", "published"))


def test_with_a_recipe_both_are_measured_and_the_json_says_the_same(run, tmp_path, capsys):
    flags, best, export, published = run
    assert main(["compare", best, published, *flags, "--validate.drafts", "3", "--json", str(tmp_path / "out.json")]) == 2
    (out, err), told = capsys.readouterr(), json.loads((tmp_path / "out.json").read_text())
    assert told["a"] == best and told["b"] == published and told["tau"]["drafts"] == 3 and told["tau"]["prompts"] == 4
    for name in ("a", "b", "ratio"):
        low, value, high = (told["tau"][name][key] for key in ("low", "value", "high"))
        assert low <= value <= high and f"{value:.3f} ({low:.3f} to {high:.3f})" in out
    assert told["tau"]["ratio"]["value"] == pytest.approx(told["tau"]["b"]["value"] / told["tau"]["a"]["value"])
    assert not told["faults"]["a"] and len(told["faults"]["b"]) == 1
    assert err == f"error: B has a fault: {told['faults']['b'][0]}\n" and "max_position_embeddings is missing" in err
    assert {row["name"] for row in told["tensors"]} >= {"fc.weight", "d2t"}


def test_an_export_is_as_good_as_what_it_was_made_of(run, capsys):
    flags, best, export, _ = run
    assert main(["compare", best, export, *flags]) == 0
    out = capsys.readouterr().out
    assert "B / A  1.000 (1.000 to 1.000)" in out and "configurations say the same" in out and "note: answers differ" not in out
    assert "fc.weight" not in out  # the same, number for number


def test_equal_tensors_are_counted_beside_those_that_differ(run, tmp_path, capsys):
    other = shutil.copytree(run[2], tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["fc.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors")
    assert main(["compare", run[2], str(other)]) == 2  # another file than was exported
    out = capsys.readouterr().out
    assert "fc.weight" in out and f"{len(weights) - 1} other tensors are equal, number for number" in out


def test_folders_without_a_drafter_are_not_said_to_be_equal(tmp_path, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    out = capsys.readouterr().out
    assert "no tensors to compare" in out and "configurations are not compared" in out
    assert "equal" not in out and "the same" not in out


def test_the_folder_of_a_run_is_told_from_its_drafters(run, tmp_path, capsys):
    _, best, export, _ = run
    for where in (tmp_path, f"{tmp_path}/"):
        assert main(["compare", str(where), best]) == 2
        assert f"is {where}, the folder of a run; name a drafter in it: {best} or {export}." in capsys.readouterr().err
    assert main(["compare", best, export]) == 0


def test_a_folder_that_cannot_be_read_stops_the_measuring_alone(run, tmp_path, capsys):
    flags, best, export, _ = run
    (tmp_path / "export" / "config.json").write_text("{")
    assert main(["compare", best, export, *flags]) == 2
    seen = capsys.readouterr()
    assert "error: B has a fault: config.json is not JSON" in seen.err and "config.json is damaged" in seen.err


def test_a_fault_ends_with_the_code_and_the_words_of_inspect(run, tmp_path, capsys):
    """Behind the tables. Differences alone are no fault."""
    _, best, export, _ = run
    assert main(["compare", best, export]) == 0 and not capsys.readouterr().err
    weights = load_file(tmp_path / "export" / "model.safetensors")
    weights["fc.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "export" / "model.safetensors")
    assert main(["inspect", export]) == 2
    faults = capsys.readouterr().err
    assert main(["compare", export, best]) == 2
    out, err = capsys.readouterr()
    assert faults and err == faults.replace("error: ", "error: A has a fault: ") and "other tensors are equal" in out


def test_without_held_out_prompts_the_stage_that_makes_them_is_named(run, tmp_path, capsys):
    flags, best, export, _ = run
    assert main(["compare", best, export, *flags[:2], "--runs", str(tmp_path / "elsewhere")]) == 2
    assert "data_prep" in capsys.readouterr().err
