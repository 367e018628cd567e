"""The ways of drafting that `bench` measures where a recipe names none, no deeper than the drafter goes."""

from dataclasses import replace

from drafttrain.decoding.methods import Chain, Method, Tree
from drafttrain.validation.bench_config import BenchConfig


def fitted(config: BenchConfig, deepest: int | None) -> BenchConfig:
    """The default methods with at most `deepest` drafts in a row (None: any number); the same config where a recipe names others."""
    if deepest is None or config.methods != BenchConfig().methods:
        return config
    return replace(config, methods=[_no_deeper(method, deepest) for method in config.methods])


def _no_deeper(method: Method, deepest: int) -> Method:
    if isinstance(method, Chain):
        return replace(method, drafts=min(method.drafts, deepest))
    if isinstance(method, Tree):
        drafts = min(method.drafts, deepest)
        return replace(method, drafts=drafts, nodes=min(method.nodes, method.top_k + (drafts - 1) * method.top_k**2))
    return method
