"""Answers to /tokenize and /detokenize. Pure."""

from schemas.errors import InvalidParameter
from schemas.generation import GenerateRequest
from schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.validation import Validator
from services.tokenizer.vocabulary import Vocabulary

OWN_FIELDS = frozenset({"return_token_strs"})
MAX_PROMPT_CHARS = 4_000_000
MAX_TOKENS = 1_000_000


def tokenize(
    request: TokenizeRequest, validator: Validator, vocabulary: Vocabulary, max_model_len: int
) -> TokenizeReply:
    """Return the tokens that a generation of the same prompt begins with; an empty prompt may have none."""
    if request.prompt is not None and len(request.prompt) > MAX_PROMPT_CHARS:
        raise InvalidParameter(f"The prompt is longer than {MAX_PROMPT_CHARS} characters.", param="prompt")
    fields = request.model_fields_set & TokenizeRequest.model_fields.keys() - OWN_FIELDS
    values = {name: getattr(request, name) for name in fields}
    generation = GenerateRequest.model_construct(_fields_set=fields, **values)
    validator.check(generation)
    if request.prompt == "":
        tokens = vocabulary.encode("", add_special_tokens=request.add_special_tokens)
    else:
        tokens = validator.encode(generation)
    texts = tuple(vocabulary.token_bytes[token].decode("utf-8", "replace") for token in tokens)
    return TokenizeReply(
        count=len(tokens),
        max_model_len=max_model_len,
        tokens=tokens,
        token_strs=texts if request.return_token_strs else None,
    )


def detokenize(request: DetokenizeRequest, validator: Validator, vocabulary: Vocabulary) -> DetokenizeReply:
    """Return the text of tokens; raises InvalidParameter for what is no token."""
    validator.check_model(request.model)
    validator.check_ids(request.tokens, "tokens", MAX_TOKENS)
    decoder = Detokenizer(vocabulary, skip_special_tokens=False)
    return DetokenizeReply(prompt="".join(map(decoder.feed, request.tokens)) + decoder.flush())
