"""What a tokenizer hears of a request: everything once, and everything again when it asks."""

from schemas.codec import encode
from schemas.errors import Cancelled
from schemas.output import NewTokens, OpenOutput, TokenBatch
from schemas.step import FinishReason, TokenLogprob
from services.scheduler.executor_state import Progress
from services.scheduler.outbox import Outbox
from services.scheduler.requests import DurableChoice, Sequence
from tests.unit.scheduler.scheduling_traffic import request


def add(
    outbox: Outbox, item: Sequence, token_id: int | None, *, end: FinishReason | None = None, stop: bool = False
) -> None:
    logprob = None
    if token_id is not None:
        item.tokens.append(token_id)
        item.logprobs.append(logprob := TokenLogprob(logprob=-float(token_id)))
    item.finish_reason = end
    outbox.add(Progress(item, token_id, logprob, end, stop))


def taken(outbox: Outbox) -> TokenBatch:
    [(tokenizer, batch)] = outbox.take()
    assert tokenizer == "tokenizer-0"
    assert batch.scheduler == "scheduler-0"
    return batch


def told(news: NewTokens) -> tuple[int, int, tuple[int, ...]]:
    return news.index, news.start, news.token_ids


def test_output_is_opened_at_its_first_token_and_then_grows() -> None:
    outbox, held = Outbox("scheduler-0"), request(n=2)
    first, second = held.sequences
    add(outbox, first, 7)
    batch = taken(outbox)
    assert batch.opened == (OpenOutput(spec=held.work.output, epoch=1),)
    assert [told(news) for news in batch.tokens] == [(0, 0, (7,))]
    add(outbox, first, 8)
    add(outbox, second, 5, end="stop", stop=True)
    batch = taken(outbox)
    assert batch.opened == ()
    assert [told(news) for news in batch.tokens] == [(0, 1, (8,)), (1, 0, (5,))]
    assert [news.logprobs[0].logprob for news in batch.tokens] == [-8.0, -5.0]
    assert (batch.tokens[1].finish_reason, batch.tokens[1].stop_token) == ("stop", True)
    assert outbox.take() == []


def test_reopening_tells_everything_again_in_a_higher_epoch() -> None:
    outbox, held = Outbox("scheduler-0"), request(n=2, stop_token_ids=(5,))
    add(outbox, held.sequences[0], 7)
    add(outbox, held.sequences[0], 5, end="stop", stop=True)
    outbox.take()
    outbox.reopen(held)
    batch = taken(outbox)
    assert batch.opened == (OpenOutput(spec=held.work.output, epoch=2, resume=True),)
    [news] = batch.tokens
    assert (told(news), news.epoch, news.finish_reason, news.stop_token) == ((0, 0, (7, 5)), 2, "stop", True)
    assert len(news.logprobs) == 2


def test_closed_output_is_opened_by_the_next_news_only() -> None:
    outbox, held = Outbox("scheduler-0"), request()
    add(outbox, held.sequences[0], 7)
    outbox.take()
    held.tokenizer = "tokenizer-1"
    outbox.close(held)
    assert outbox.take() == []
    add(outbox, held.sequences[0], 8)
    [(tokenizer, batch)] = outbox.take()
    assert tokenizer == "tokenizer-1"
    assert [opened.epoch for opened in batch.opened] == [2]
    assert [told(news) for news in batch.tokens] == [(0, 0, (7, 8))]
    outbox.close(held)
    outbox.reopen(held)
    assert held.epoch == 3


def test_resumed_request_begins_behind_what_the_log_holds() -> None:
    outbox = Outbox("scheduler-0")
    held = request(epoch=4, durable=(DurableChoice(token_ids=(7, 8)),))
    add(outbox, held.sequences[0], 9)
    batch = taken(outbox)
    assert [opened.resume for opened in batch.opened] == [True]
    assert [told(news) for news in batch.tokens] == [(0, 2, (9,))]


def test_failure_opens_an_output_that_has_none() -> None:
    outbox, held = Outbox("scheduler-0"), request()
    held.error = Cancelled("x")
    outbox.fail(held)
    batch = taken(outbox)
    assert (len(batch.opened), [failure.error.code for failure in batch.failed]) == (1, ["cancelled"])


def test_failure_after_tokens_is_told_once_and_again_after_a_loss() -> None:
    outbox, held = Outbox("scheduler-0"), request()
    add(outbox, held.sequences[0], 7)
    held.error = Cancelled("x")
    outbox.fail(held)
    batch = taken(outbox)
    assert (len(batch.opened), len(batch.tokens), len(batch.failed)) == (1, 1, 1)
    outbox.reopen(held)
    batch = taken(outbox)
    assert [(failure.epoch, failure.request_id) for failure in batch.failed] == [(2, "r")]


def test_end_without_a_token() -> None:
    outbox, held = Outbox("scheduler-0"), request()
    add(outbox, held.sequences[0], 7)
    add(outbox, held.sequences[0], None, end="length")
    assert [(told(news), news.finish_reason) for news in taken(outbox).tokens] == [
        ((0, 0, (7,)), None),
        ((0, 1, ()), "length"),
    ]


def test_each_tokenizer_gets_its_own_batch() -> None:
    outbox, one, two = Outbox("scheduler-0"), request("a"), request("b", tokenizer="tokenizer-1")
    for held in (one, two):
        add(outbox, held.sequences[0], 7)
    assert [tokenizer for tokenizer, _ in outbox.take()] == ["tokenizer-0", "tokenizer-1"]


def test_much_news_is_cut_into_messages_that_the_bus_takes() -> None:
    outbox, held = Outbox("scheduler-0", max_batch_bytes=20_000), request(n=2)
    for item in held.sequences:
        item.tokens += range(1300)
        item.logprobs += [TokenLogprob(logprob=-1.0, top=((1, -1.0), (2, -2.0)))] * 1300
        item.finish_reason, item.status = "stop", "finished"
    outbox.open(held)
    batches = [batch for _, batch in outbox.take()]
    assert max(len(encode(batch)) for batch in batches) < 2 * 20_000
    assert [len(batch.opened) for batch in batches] == [1] + [0] * (len(batches) - 1)
    for index in range(2):
        pieces = [news for batch in batches for news in batch.tokens if news.index == index]
        assert [token for news in pieces for token in news.token_ids] == list(range(1300))
        assert [news.start for news in pieces] == [0, 512, 1024]
        assert [len(news.logprobs) for news in pieces] == [512, 512, 276]
        assert [news.finish_reason for news in pieces] == [None, None, "stop"]


def test_failures_come_behind_the_tokens_when_news_is_cut() -> None:
    outbox, held = Outbox("scheduler-0", max_batch_bytes=100), request()
    add(outbox, held.sequences[0], 7)
    held.error = Cancelled("gone")
    outbox.fail(held)
    batches = [batch for _, batch in outbox.take()]
    assert [(len(b.opened), len(b.tokens), len(b.failed)) for b in batches] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
