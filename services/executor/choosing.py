"""What the engine is told about choosing a sequence's next token. Pure.

Everything follows from the request's parameters and the tokens so far, so a sequence that is resumed elsewhere is
continued as it would have been.
"""

from collections.abc import Sequence as Items

from engine_core.batch import Penalties, Sampling
from engine_core.grammar import NOTHING, Grammar
from schemas.sampling import SamplingParams


class Choosing:
    """One sequence's parameters, and the state of its grammar if it has one.

    `end_tokens` cannot be chosen before `min_tokens` tokens were generated.
    """

    def __init__(self, params: SamplingParams, end_tokens: tuple[int, ...], grammar: Grammar | None = None) -> None:
        self._params = params
        self._grammar = grammar
        self._end_tokens = tuple(dict.fromkeys(end_tokens))
        self._allowed = mask_of(params.allowed_token_ids) if params.allowed_token_ids else None
        self._penalises = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)

    def next_token(self, tokens: Items[int], prompt_len: int) -> Sampling:
        """Return how to choose the token after `tokens`, of which the first `prompt_len` are the prompt."""
        params = self._params
        return Sampling(
            position=len(tokens),
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            num_logprobs=params.num_logprobs,
            banned=self._banned(tokens, prompt_len),
            allowed=self._allowed_after(tokens, prompt_len),
            bias=params.logit_bias,
            penalties=self._penalties(tokens, prompt_len) if self._penalises else None,
        )

    def forced_token(self, tokens: Items[int], prompt_len: int) -> int | None:
        """Return the token that alone may come after `tokens` by the grammar: whatever the logits, it would be chosen.

        None when there is a choice or nothing, and when logprobs are asked for, which need the logits.
        """
        if self._grammar is None or self._params.num_logprobs is not None:
            return None
        token = only_token(self._allowed_after(tokens, prompt_len) or NOTHING)
        return None if token is None or token in self._banned(tokens, prompt_len) else token

    def is_complete(self, tokens: Items[int], prompt_len: int) -> bool:
        """Tell whether the grammar lets nothing follow `tokens`."""
        if self._grammar is None:
            return False
        self._grammar.advance(tokens[prompt_len:])
        return self._grammar.is_complete

    @property
    def is_broken(self) -> bool:
        """Tell whether the grammar could not be followed."""
        return self._grammar is not None and self._grammar.is_broken

    def _allowed_after(self, tokens: Items[int], prompt_len: int) -> bytes | None:
        if self._grammar is None:
            return self._allowed
        self._grammar.advance(tokens[prompt_len:])
        mask = NOTHING if self._grammar.is_complete else self._grammar.mask()
        return mask if self._allowed is None else bytes(a & b for a, b in zip(mask, self._allowed, strict=False))

    def _banned(self, tokens: Items[int], prompt_len: int) -> tuple[int, ...]:
        ends = self._end_tokens if len(tokens) - prompt_len < self._params.min_tokens else ()
        if not self._params.bad_words:
            return ends
        last_ones = (word[-1] for word in self._params.bad_words if _ends_with(tokens, prompt_len, word[:-1]))
        return tuple(dict.fromkeys((*ends, *last_ones)))

    def _penalties(self, tokens: Items[int], prompt_len: int) -> Penalties:
        return Penalties(
            presence=self._params.presence_penalty,
            frequency=self._params.frequency_penalty,
            repetition=self._params.repetition_penalty,
            prompt=tuple(tokens[:prompt_len]),
            generated=tuple(tokens[prompt_len:]),
        )


def mask_of(tokens: tuple[int, ...]) -> bytes:
    """Return the bitmask of `tokens`: bit t % 8 of byte t // 8."""
    mask = bytearray(max(tokens, default=-1) // 8 + 1)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def only_token(mask: bytes) -> int | None:
    """Return the token of a bitmask that holds exactly one."""
    bits = mask.strip(b"\0")
    if len(bits) != 1 or bits[0].bit_count() != 1:
        return None
    return 8 * mask.index(bits) + bits[0].bit_length() - 1


def _ends_with(tokens: Items[int], prompt_len: int, ending: tuple[int, ...]) -> bool:
    """Tell whether the generated tokens end so: a bad word that begins in the prompt is the client's own."""
    begin = len(tokens) - len(ending)
    return begin >= prompt_len and tuple(tokens[begin:]) == ending
