"""On a GPU: every verifier fits into a CUDA graph that replays on new numbers, and is quick. `pytest -m gpu -s` prints the times."""

import pytest
import torch
from decoding.test_verify_exact import METHODS, Method
from decoding.verify_cases import drawn, streams, world_of
from torch import Tensor

from drafttrain.decoding.sampling import Sampling, probabilities
from drafttrain.decoding.verify import Match
from drafttrain.decoding.verify_chain import Block, TokenWise
from drafttrain.decoding.verify_tree import KSeq, Rejection
from drafttrain.types import Proposal, Verdict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SAMPLING = Sampling(temperature=0.8, top_p=0.9, top_k=4)


def captured(run) -> tuple[torch.cuda.CUDAGraph, Verdict]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = run()
    return graph, verdict


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_graph_replays_what_a_cpu_says(method: Method):
    def inputs(seed: int) -> list[Tensor]:
        stream, length = streams(64, seed), torch.arange(64) + seed
        world, text = world_of("near", 6, seed), torch.zeros(64, dtype=torch.long)
        logits, drafts = drawn(world, method.branching, method.replacement, SAMPLING, stream, length, text)
        assert drafts.valid_BN is not None and drafts.q_BPV is not None
        return [logits, drafts.tokens_BN, drafts.parents_BN, drafts.valid_BN, drafts.q_BPV, stream, length]

    def run(logits, tokens, parents, valid, q, stream, length):
        return method.verify(logits, Proposal(tokens, parents, valid, q), SAMPLING, stream, length)

    held = [x.cuda() for x in inputs(0)]
    graph, verdict = captured(lambda: run(*held))
    for seed in range(1, 5):
        fresh = inputs(seed)
        for buffer, values in zip(held, fresh, strict=True):
            buffer.copy_(values)
        graph.replay()
        wanted = run(*fresh)
        assert torch.equal(verdict.accepted_B.cpu(), wanted.accepted_B) and torch.equal(verdict.said_B.cpu(), wanted.said_B)
        assert torch.equal(verdict.path_BK.cpu(), wanted.path_BK)


@pytest.mark.parametrize(
    ("verify", "widths"),
    [
        (Match(5), (1,) * 5),
        (Match(4), (8, 1, 1, 1)),
        (Rejection((1,) * 5), (1,) * 5),
        (Rejection((4, 2, 2, 1)), (4, 2, 2, 1)),
        (TokenWise(), (1,) * 5),
        (Block(), (1,) * 5),
        (KSeq((4, 4, 4)), (4, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_time_of_a_replay(verify, widths, top_p):
    B, V, sampling = 1, 49_152, Sampling(temperature=1.0, top_p=top_p)
    parents, level = [], [-1]
    for width in widths:
        first = len(parents)
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(first, len(parents)))
    N = len(parents)
    logits = torch.randn(B, N + 1, V, device="cuda") * 3
    q = probabilities(logits + torch.randn_like(logits), sampling)
    tokens = q[:, [p + 1 for p in parents]].flatten(0, 1).multinomial(1).view(B, N)
    proposal = Proposal(tokens, torch.tensor([parents], device="cuda").expand(B, N), None, q)
    stream, length = streams(B).cuda(), torch.full((B,), 100, device="cuda")
    graph, _ = captured(lambda: verify(logits, proposal, sampling, stream, length))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(20):
        graph.replay()
    start.record()
    for _ in range(200):
        graph.replay()
    end.record()
    end.synchronize()
    milliseconds = start.elapsed_time(end) / 200
    print(f"\n{verify} top_p {top_p}: {milliseconds:.3f} ms for {N} nodes, vocabulary {V}, {torch.cuda.get_device_name()}")
    assert milliseconds < 5
