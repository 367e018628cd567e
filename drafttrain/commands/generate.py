"""`drafttrain generate`: an answer, the tokens that the drafter guessed in colour."""

from rich.console import Console
from rich.text import Text

from drafttrain.commands.drafts import find_draft, load_draft
from drafttrain.decoding.engine import generate
from drafttrain.decoding.measure import count
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.errors import UserError
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.target.load import load_target
from drafttrain.types import Request
from drafttrain.validation.samples import pieces

ACCEPTED = "bold green"


def run(recipe: Recipe, options: Options) -> None:
    """Answer `options.prompt` greedily and print it. Raises UserError."""
    if not options.prompt:
        raise UserError('generate needs words to answer: --prompt "Name three rivers."')
    draft = options.draft or find_draft(options.run)
    target = load_target(recipe.target)
    net = load_draft(draft, target)
    drafts, limit = recipe.validate.drafts, recipe.validate.max_tokens
    request = Request("prompt", tuple(target.render([{"role": "user", "content": options.prompt}])), limit)
    rollout = next(generate(target, [request], proposer=ChainProposer(net, drafts), slots=1))
    counts = count([rollout], drafts)
    answer = Text()
    for piece in pieces(target.tokenizer, rollout):
        answer.append(piece.text, style=ACCEPTED if piece.drafted else "")
    console = Console(highlight=False)
    console.print(answer)
    rate = counts.tokens / max(counts.rounds, 1)
    summary = (
        f"\n{counts.tokens} tokens in {counts.rounds} rounds ({rate:.2f} a round), tau {counts.tau:.2f} with {drafts} drafts; "
    )
    console.print(Text.assemble(summary, ("guessed by the drafter", ACCEPTED), ", the rest said by the target"))
