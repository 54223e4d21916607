"""The options of a request that say how tokens are chosen: checked, and resolved against the vocabulary. Pure."""

from schemas.errors import InvalidParameter
from schemas.generation import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    GenerateRequest,
)
from schemas.sampling import SamplingParams
from services.tokenizer.embedding import pooling_of
from services.tokenizer.vocabulary import Vocabulary

SEED_MODULUS = 2**64


def resolve_sampling(
    request: GenerateRequest, vocabulary: Vocabulary, random_seed: int, grammar: str = ""
) -> SamplingParams:
    """Return the parameters with every default resolved; raises InvalidParameter that names the option."""
    seed = request.seed if request.seed is not None else random_seed
    repetition = request.repetition_penalty
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=seed % SEED_MODULUS,
        min_tokens=request.min_tokens,
        num_logprobs=request.logprobs,
        num_prompt_logprobs=num_prompt_logprobs(request),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(request.logit_bias or {}, vocabulary.size),
        allowed_token_ids=_allowed(request.allowed_token_ids, vocabulary.size),
        bad_words=_bad_words(request.bad_words or (), vocabulary),
        grammar=grammar,
        pooling=pooling_of(request),
    )


def num_prompt_logprobs(request: GenerateRequest) -> int | None:
    """Return how many alternatives of each prompt token are wanted; echo wants what logprobs ask for."""
    of_echo = request.logprobs if request.echo else None
    wanted = [count for count in (of_echo, request.prompt_logprobs) if count is not None]
    return max(wanted, default=None)


def check_sampling(request: GenerateRequest, vocabulary: Vocabulary) -> None:
    """Raise InvalidParameter for what is wrong whatever the prompt."""
    params = resolve_sampling(request, vocabulary, random_seed=0)
    if not params.allowed_token_ids:
        return
    never = {word[0] for word in params.bad_words if len(word) == 1}
    early = never.union(request.stop_token_ids, vocabulary.end_token_ids) if params.min_tokens else never
    if early.issuperset(params.allowed_token_ids):
        raise InvalidParameter(
            "min_tokens and bad_words exclude every token of allowed_token_ids.", param="allowed_token_ids"
        )


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidParameter(
            f"logit_bias has {len(biases)} entries; at most {MAX_LOGIT_BIASES} are allowed.", param="logit_bias"
        )
    if any(abs(value) > MAX_LOGIT_BIAS for value in biases.values()):
        raise InvalidParameter(
            f"The values of logit_bias must be from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}.", param="logit_bias"
        )
    return tuple((_token_id(key, vocab_size), value) for key, value in biases.items())


def _token_id(text: str, vocab_size: int) -> int:
    """Read a key of logit_bias, which JSON makes a text."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(vocab_size)) and int(text) < vocab_size):
        raise InvalidParameter(
            f"The keys of logit_bias must be token ids from 0 to {vocab_size - 1}.", param="logit_bias"
        )
    return int(text)


def _allowed(ids: tuple[int, ...] | None, vocab_size: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not 0 < len(ids) <= MAX_ALLOWED_TOKEN_IDS:
        raise InvalidParameter(
            f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} entries, not {len(ids)}.",
            param="allowed_token_ids",
        )
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidParameter(
            f"allowed_token_ids must be token ids from 0 to {vocab_size - 1}.", param="allowed_token_ids"
        )
    return tuple(dict.fromkeys(ids))


def _bad_words(words: tuple[str, ...], vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at a text's beginning and after a space."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameter(
            f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS} are allowed.", param="bad_words"
        )
    if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise InvalidParameter(f"Each bad word must have 1 to {MAX_BAD_WORD_CHARS} characters.", param="bad_words")
    spellings = (spelling for word in words for spelling in (word, " " + word.lstrip()))
    encoded = (vocabulary.encode(spelling, add_special_tokens=False) for spelling in spellings)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))
