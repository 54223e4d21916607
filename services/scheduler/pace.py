"""How long a prompt chunk may be so that a step keeps the inter-token target. Pure: learns from measured steps only.

Everything it knows came in step results, so the same results give the same chunks again, in a replay as well.
"""


class Pace:
    """Multiplicative control of one number, the prompt tokens that a step may run beside decodes.

    A step that ran `n` prompt tokens in the time T says that `n · target / T` would be about right: too little change
    while decodes take part of T, so it needs a few steps to settle, but no model of the engine. Shorter chunks than
    allowed can only raise the limit, longer steps always lower it.
    """

    def __init__(self, target_s: float, block_size: int, max_tokens: int) -> None:
        self._target_s = target_s
        self._least = float(block_size)
        self._most = float(max(max_tokens, block_size))
        self._limit = self._most

    def learn(self, num_prompt_tokens: int, duration_s: float) -> None:
        """Take a step's measured duration, in seconds; steps without prompts say nothing about them."""
        if self._target_s <= 0 or num_prompt_tokens <= 0 or duration_s <= 0:
            return
        fitting = num_prompt_tokens * min(self._target_s / duration_s, 2.0)
        limit = fitting if duration_s > self._target_s else max(self._limit, fitting)
        self._limit = min(max(limit, self._least), self._most)

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens of a step that also runs decodes: whole blocks, at least one, so that prompts get on."""
        return int(self._limit // self._least * self._least)
