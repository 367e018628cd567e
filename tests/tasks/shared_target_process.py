"""Reads with a target that two processes share, under torchrun: `python shared_target_process.py FOLDER...`. Each compares with the whole target."""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from tasks.test_speed import TAPS, packed  # noqa: E402

from drafttrain.target.config import TargetConfig  # noqa: E402
from drafttrain.target.load import load_target  # noqa: E402
from drafttrain.tasks.shared_target import SharedRead  # noqa: E402


def main(folder: str) -> None:
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    config, world = TargetConfig(path=folder), dist.get_world_size()
    whole, shared = load_target(config, device=device), load_target(config, device=device, shards=world)
    assert shared.identity == whole.identity

    parts = [weight for weight in shared.body.layers.parameters() if isinstance(weight, DTensor)]
    held = sum(weight.to_local().numel() for weight in parts)
    assert parts and held * world == sum(weight.numel() for weight in parts), "every process holds as much of each layer"
    everywhere = {
        name for name, weight in shared.body.layers.named_parameters() if weight.dim() > 1 and not isinstance(weight, DTensor)
    }
    assert all(name.endswith("mlp.gate.weight") for name in everywhere), "no matrix of a layer is whole but a router of experts"
    assert torch.equal(shared.head_weight, whole.head_weight) and torch.equal(shared.embedding_weight, whole.embedding_weight)
    tied = whole.head_weight.data_ptr() == whole.embedding_weight.data_ptr()
    assert (shared.head_weight.data_ptr() == shared.embedding_weight.data_ptr()) == tied

    mine = packed(10 + dist.get_rank()).to(device)  # other rows in every process
    wanted = whole.read_packed(mine, TAPS)
    found = SharedRead(partial(shared.read_packed, taps=TAPS))(mine)
    for name in ("taps_BTAD", "final_BTD"):
        one, two = getattr(found, name), getattr(wanted, name)
        assert type(one) is torch.Tensor and float((one - two).norm() / two.norm()) < 1e-5, name
    torch.testing.assert_close(shared.logits(found.final_BTD), whole.logits(wanted.final_BTD), rtol=1e-4, atol=1e-4)
    print(f"rank {dist.get_rank()}: {Path(folder).name} agrees", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for given in sys.argv[1:]:
        main(given)
    dist.destroy_process_group()
