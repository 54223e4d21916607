"""Two hundred requests and more of every kind, with short outputs: what the proofs of recording and replay send."""

import asyncio
from typing import Any

from schemas.generation import ChatMessage, GenerateRequest
from schemas.tools import Tool, ToolFunction
from services.runtime.bus import Bus
from tests.integration.varied_traffic import LONG, send_all, send_and_leave, send_malformed, wrong_requests

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "A natterjack toad",
    "Numbers: one, two,",
    "Colours are red and",
    "My favourite book is",
    "To bake bread, you",
    "Yesterday it rained, so",
)
TOOL = Tool(
    type="function",
    function=ToolFunction(
        name="look_up",
        description="Look a word up.",
        parameters={"type": "object", "properties": {"word": {"type": "string", "maxLength": 8}}, "required": ["word"]},
    ),
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "max_tokens": 20},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11},
    {"temperature": 1.0, "min_p": 0.1, "seed": -3},
    {"temperature": 1.0, "n": 3, "seed": 5},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.0, "stop": (" the", "\n")},
    {"temperature": 0.0, "stop": "a", "include_stop_str_in_output": True},
    {"temperature": 0.0, "stop_token_ids": (28, 30)},
    {"temperature": 0.0, "logprobs": 2, "max_tokens": 6},
    {"temperature": 0.0, "prompt_logprobs": 1, "echo": True, "max_tokens": 2},
    {"temperature": 0.0, "ignore_eos": True, "min_tokens": 4, "priority": "high"},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": {"198": 5.0}, "priority": "low"},
    {"temperature": 0.0, "allowed_token_ids": (253, 282, 284, 314)},
    {"temperature": 0.0, "bad_words": (" of", " is")},
    {"temperature": 0.0, "structured_outputs": {"choice": ["yes", "no", 'a"b']}},
    {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}},
    {
        "temperature": 0.0,
        "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    },
    {"temperature": 0.0, "truncate_prompt_tokens": 3},
)
CHATS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1, "n": 2},
    {"temperature": 0.0, "max_tokens": 48, "tools": (TOOL,), "tool_choice": "required"},
)


def mixed_requests(model: str = "smol") -> list[GenerateRequest]:
    """Return every kind with every prompt, chats, long prompts, and what is refused."""
    ask = GenerateRequest(model=model, max_tokens=10)

    def make(**changes: Any) -> GenerateRequest:
        return ask.model_copy(update=changes)

    requests = [make(prompt=prompt, **kind) for prompt in PROMPTS for kind in KINDS]
    for prompt in PROMPTS[:4]:
        messages = (ChatMessage(role="user", content=f"{prompt} … ?"),)
        requests += [make(messages=messages, **kind) for kind in CHATS]
    requests += [make(prompt=LONG * times + prompt, temperature=0.0) for times in (1, 2, 4) for prompt in PROMPTS[:2]]
    return [*requests, *wrong_requests(model), *wrong_requests(model)]


async def send_mixed(bus: Bus, model: str = "smol") -> int:
    """Send everything, eight at a time, and cancel some stories meanwhile; returns how many requests that were."""
    requests = mixed_requests(model)
    story = GenerateRequest(model=model, prompt="Once upon a time", max_tokens=400, ignore_eos=True, temperature=0.0)

    async def cancel_some() -> None:
        for number in range(6):
            await send_and_leave(bus, story.model_copy(update={"seed": number}), 1 + number % 3)

    await asyncio.gather(send_all(bus, requests), send_malformed(bus, model), cancel_some())
    return len(requests) + 8
