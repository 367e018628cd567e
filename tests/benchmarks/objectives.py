"""What each divergence costs: python tests/benchmarks/objectives.py [--elements 8192] [--rows 2048] [--words 32768] [flags]

    --width 2048        of the drafter's and the target's hidden states
    --whole 0           words of the target, if more than can be said: then LK's divergences multiply with its whole head
    --chunk 1024 --dtype bfloat16 --compile --repeats 5

Scores random elements of made-up drafts and goes all the way back to the head and the hidden states, with all logits at once (plain) and
in chunks. Columns: milliseconds of a repeat (the median) and, on a GPU, the peak of memory above what was there before.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from drafttrain.divergences import Divergence
from drafttrain.losses import Distillation
from drafttrain.position_weights import DPace
from drafttrain.recipe_build import choices
from drafttrain.types import Drafted

DEPTH = 5


class Head:
    """A target's head."""

    def __init__(self, words: int, whole: int, width: int, device: torch.device, dtype: torch.dtype):
        self.weight_VD = torch.randn(max(words, whole), width, device=device, dtype=dtype) / width**0.5
        self.words = words

    def logits(self, final_ND: Tensor) -> Tensor:
        return final_ND @ self.weight_VD[: self.words].T

    def log_mass(self, final_ND: Tensor, logits_NV: Tensor) -> Tensor:
        if len(self.weight_VD) == self.words:
            return logits_NV.new_zeros(len(logits_NV))
        return logits_NV.logsumexp(-1) - (final_ND @ self.weight_VD.T).float().logsumexp(-1)


def elements(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Drafted:
    N, drafts = args.elements, -(-args.elements // DEPTH)
    place_N = torch.arange(N, device=device)
    return Drafted(
        hidden_NH=torch.randn(N, args.width, device=device, dtype=dtype).requires_grad_(),
        teacher_MD=torch.randn(args.rows, args.width, device=device, dtype=dtype),
        row_N=place_N % args.rows,
        label_N=torch.randint(args.words, (N,), device=device),
        prev_N=torch.zeros_like(place_N),
        draft_N=place_N % drafts,
        drafts=drafts,
        depth_N=place_N // drafts + 1,
        vocabulary_V=torch.arange(args.words, device=device),
    )


def measure(objective: Distillation, drafted: Drafted, args: argparse.Namespace, teacher: Head) -> tuple[float, float]:
    """(milliseconds, MiB)"""
    device, dtype = drafted.hidden_NH.device, drafted.hidden_NH.dtype
    head = nn.Linear(args.width, args.words, bias=False, device=device, dtype=dtype)

    def score() -> Tensor:
        terms, _ = objective.terms(drafted, lambda hidden_NH, prev_N: head(hidden_NH), teacher, DEPTH)
        return torch.stack([term.sum / term.count for term in terms.values()]).sum()

    run, seconds, cuda = torch.compile(score) if args.compile else score, [], device.type == "cuda"
    for repeat in range(args.repeats + 1):  # the first warms up
        drafted.hidden_NH.grad = head.weight.grad = None
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        run().backward()
        if cuda:
            torch.cuda.synchronize()
        if repeat:
            seconds.append(time.perf_counter() - began)
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else float("nan")
    return 1e3 * statistics.median(seconds), memory


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("elements", 8192), ("rows", 2048), ("words", 32768), ("whole", 0), ("width", 2048), ("chunk", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    drafted, teacher = elements(args, device, dtype), Head(args.words, args.whole, args.width, device, dtype)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{vars(args)} on {where}, torch {torch.__version__}")
    print(f"{'':20}{'plain ms':>10}{'MiB':>9}{'chunked ms':>12}{'MiB':>9}")
    for name, cls in choices(Divergence).items():
        cells = [measure(Distillation([cls()], DPace(), "drafts", chunk), drafted, args, teacher) for chunk in (0, args.chunk)]
        print(f"{name:20}{cells[0][0]:10.1f}{cells[0][1]:9.0f}{cells[1][0]:12.1f}{cells[1][1]:9.0f}", flush=True)


if __name__ == "__main__":
    main()
