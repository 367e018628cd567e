"""`drafttrain generate`: an answer, the tokens that the drafter guessed in colour, or in brackets where the output is no terminal."""

from rich.console import Console
from rich.text import Text

from data_prep.dialects import Broken, text_of
from data_prep.show import CLOSE, OPEN
from drafttrain.commands.drafts import Draft, load
from drafttrain.decoding.engine import generate
from drafttrain.decoding.measure import count
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.errors import UserError
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.types import Request
from drafttrain.validation.samples import pieces

ACCEPTED = "bold green"


def run(recipe: Recipe, options: Options) -> None:
    """Answer `options.prompt` greedily and print it. Raises UserError."""
    if not options.prompt:
        raise UserError('generate needs words to answer: --prompt "Name three rivers."')
    try:
        text_of(options.prompt, "prompt")
    except Broken as error:  # bytes of a shell that are no UTF-8 come as halves of surrogate pairs
        raise UserError(f"--prompt is {error}; give text in UTF-8.") from None
    draft = Draft.of(recipe, options)
    target = load(recipe.target)
    net, _ = draft.load(target, recipe)
    drafts, limit = recipe.validate.drafts, recipe.validate.max_tokens
    request = Request("prompt", tuple(target.render([{"role": "user", "content": options.prompt}])), limit)
    rollout = next(generate(target, [request], proposer=ChainProposer(net, drafts), slots=1))
    counts = count([rollout], drafts)
    console = Console(highlight=False)
    answer = Text()
    colour = console.is_terminal and not console.no_color
    opens, closes = ("", "") if colour else (OPEN, CLOSE)
    for piece in pieces(target.tokenizer, rollout):
        answer.append(f"{opens}{piece.text}{closes}" if piece.drafted else piece.text, style=ACCEPTED if piece.drafted else "")
    console.print(answer, soft_wrap=True)
    summary = (
        f"\n{counts.tokens} tokens in {counts.rounds} rounds behind the first token, tau {counts.tau:.2f} with {drafts} drafts; "
    )
    guessed = f"{opens}guessed by the drafter{closes}", ACCEPTED
    console.print(Text.assemble(summary, guessed, ", the rest said by the target"), soft_wrap=True)
    if not rollout.stopped:
        said_by = options.typed.get("validate.max_tokens", "validate.max_tokens")
        console.print(
            f"stopped at its limit of {limit} tokens ({said_by}); for a longer answer give --max-tokens {4 * limit}",
            soft_wrap=True,
        )
