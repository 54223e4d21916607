"""What is known about an answer once its prompts are accepted: all that framing needs besides the chunks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.generation import Accepted
from schemas.output import Usage
from services.gateway.shapes import JsonObject, Shape
from services.gateway.translate import Translation


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer to one or several prompts.

    `created` is Unix time in seconds. `echo`: the logprobs of the prompt's tokens stand before those of the answer's;
    `prompt_logprobs`: they stand apart. The choices of prompt p are numbered p·n … p·n + n - 1 in the answer.
    """

    shape: Shape
    id: str
    created: int
    model: str
    num_choices: int
    num_prompt_tokens: tuple[int, ...]
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    echo: bool = False
    prompt_logprobs: bool = False

    @property
    def num_prompts(self) -> int:
        """How many prompts are answered."""
        return len(self.num_prompt_tokens)

    def index(self, prompt: int, choice: int) -> int:
        """Return the number in the answer of a prompt's choice."""
        return prompt * self.num_choices + choice

    def head(self, kind: str) -> JsonObject:
        """Return the fields that every object of this answer repeats."""
        return {"id": self.shape.id_prefix + self.id, "object": kind, "created": self.created, "model": self.model}

    def first_usages(self) -> list[Usage]:
        """Return each prompt's usage before anything was generated."""
        return [Usage(prompt_tokens=count, completion_tokens=0) for count in self.num_prompt_tokens]


def answer_to(shape: Shape, translation: Translation, accepted: Sequence[Accepted]) -> Answer:
    """Return the answer that begins when every prompt of `translation` is accepted."""
    options = translation.options
    return Answer(
        shape=shape,
        id=translation.id,
        created=int(accepted[0].created_s),
        model=accepted[0].model,
        num_choices=translation.requests[0].n,
        num_prompt_tokens=tuple(one.num_prompt_tokens for one in accepted),
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        token_ids=options.token_ids,
        echo=bool(translation.requests[0].echo),
        prompt_logprobs=translation.requests[0].prompt_logprobs is not None,
    )
