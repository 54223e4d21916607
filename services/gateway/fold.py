"""Output chunks become one whole answer: what a client gets that does not stream. Pure."""

from dataclasses import dataclass, field

from pydantic_core import to_json

from schemas.output import ChoiceDelta, OutputChunk, TokenText, ToolCallDelta
from services.gateway.answer import Answer
from services.gateway.shapes import JsonObject, prompt_logprobs, usage_object


@dataclass(slots=True)
class _Choice:
    """One choice as far as it has come."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] | None = None
    prompt: list[TokenText] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.prompt.extend(delta.prompt)
        for call in delta.tool_calls:
            self._add_call(call)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.index == len(self.calls):
            self.calls.append(call)
        else:
            known = self.calls[call.index]
            self.calls[call.index] = known.model_copy(update={"arguments": known.arguments + call.arguments})


class Fold:
    """One answer, put together from the chunks of all its prompts; `usages` holds each prompt's token counts."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = [_Choice() for _ in range(answer.num_prompts * answer.num_choices)]
        self.usages = answer.first_usages()

    def add(self, prompt: int, chunk: OutputChunk) -> None:
        """Take one chunk of prompt number `prompt`."""
        if chunk.usage is not None:
            self.usages[prompt] = chunk.usage
        for delta in chunk.choices:
            self._choices[self._answer.index(prompt, delta.index)].add(delta)

    def body(self) -> bytes:
        """Return the answer as JSON."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        head = self._answer.head(self._answer.shape.object)
        if self._answer.prompt_logprobs and self._answer.shape.prompt_is_shared:
            head["prompt_logprobs"] = prompt_logprobs(self._choices[0].prompt)
        return to_json({**head, "choices": choices, "usage": usage_object(self.usages)})

    def _choice(self, index: int, choice: _Choice) -> JsonObject:
        shape = self._answer.shape
        fields: JsonObject = {"index": index, **shape.whole("".join(choice.text), choice.calls), "logprobs": None}
        if choice.logprobs is not None:
            shown = choice.prompt + choice.logprobs if self._answer.echo else choice.logprobs
            fields["logprobs"] = shape.logprobs(shown, 0)
        if self._answer.prompt_logprobs and not shape.prompt_is_shared:
            fields["prompt_logprobs"] = prompt_logprobs(choice.prompt)
        fields |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if self._answer.token_ids:
            fields["token_ids"] = choice.token_ids
        return fields
