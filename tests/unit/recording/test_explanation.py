"""The story of one request names what was decided, and keeps others' messages out."""

from schemas.control import DeadLetter, HandedBack
from services.recording.capture_file import Captured
from services.recording.explanation import as_text, narrate
from tests.unit.recording.captured_traffic import captured, inner_path, one_request, refused


def story_text(messages, name="req-1", *, is_brief=False):
    return as_text(narrate(messages, name), is_brief=is_brief)


def whole_path():
    ends = one_request(stop=("END",))
    return sorted([*ends, *inner_path(), *one_request("other", at_s=1000.05)], key=lambda c: c.arrived_s)


def test_every_stage_is_told_in_order():
    text = story_text(whole_path())
    expected = [
        "client → tokenizer",
        "asks model 'smol' to go on from 'Hi'",
        "queued with priority normal: 2 prompt tokens, 1 × up to 8 tokens, temperature 1.0, seed 7",
        "accepted: stored, with 2 prompt tokens",
        "acquire blocks for 10 tokens on executor-0",
        "NOT granted: too few blocks (0 of 9 blocks are free)",
        "granted 1 blocks, 1 tokens are in them already (5 of 9 blocks are free)",
        "step 1 of epoch 4: begins choice 0 on executor-0 (2 prompt tokens, 1 tokens from cache)",
        "step 1 of epoch 4: run 2 tokens in a batch of 2",
        "step 1, 2.00 ms: token 11 at position 2",
        "open the output, writer's epoch 1",
        "extend the lease to 20 tokens",
        "step 2 of epoch 4: drop sequence 2",
        "begins choice 0 again after a PREEMPTION, 1 tokens known, 1 tokens from cache",
        "again after a TAKEOVER (new epoch), 1 tokens known",
        "which ends it: length",
        "failed: invalid_parameter",
        "cancel: cancelled by the client",
        "LOST: misses tokens from 3 on",
        "the final chunk is stored",
        "release the blocks",
        "FINAL, 2 + 3 tokens",
    ]
    position = 0
    for words in expected:
        position = text.index(words, position)
    assert "trace 0af7651916cd43dd8448eb211c80319c" in text
    assert "1 prompt tokens from cache; 1 preemptions, 1 takeovers" in text
    assert "other" not in text


def test_briefly_steady_steps_are_drawn_together():
    messages = one_request(tokens=range(20), text="x" * 20)
    brief, whole = (story_text(messages, is_brief=brief) for brief in (True, False))
    assert "… 18 messages of steady decoding" in brief
    assert len(brief.splitlines()) == len(whole.splitlines()) - 17


def test_a_refusal_is_told_with_its_reason():
    text = story_text([one_request()[0], refused("_INBOX.req-1", 1000.1)])
    assert "refused: invalid_parameter: temperature must be at most 2." in text


def test_another_writer_and_an_error_at_the_end_are_news():
    messages = one_request()
    messages[-2].body["epoch"] = 5
    messages[-1].body.update({"epoch": 5, "error": {"code": "cancelled", "message": "The request was cancelled."}})
    text = story_text(messages, is_brief=True)
    assert "NEW WRITER, epoch 5" in text
    assert "FINAL, cancelled: The request was cancelled." in text


def test_long_and_odd_prompts_are_shortened():
    messages = one_request(prompt="x" * 200)
    assert "x…'" in story_text(messages)
    messages[0].body["prompt"] = [1, 2, 3]
    assert "3 token ids" in story_text(messages)
    messages[0].body.update({"prompt": None, "messages": [{}, {}]})
    assert "2 chat messages" in story_text(messages)


def test_an_unknown_request_and_an_unknown_kind():
    assert story_text(whole_path(), "nobody") == "Nothing of nobody is known here."
    invented = Captured(1.0, "nj.v1.new.x", {"request_id": "r"}, schema="invented/1")
    assert "a kind that this version does not know" in story_text([invented], "r")


def test_what_was_handed_back_and_given_up_is_told():
    handed = HandedBack(scheduler="scheduler-0", request_ids=("other", "req-1"), at_s=1000.2)
    given_up = DeadLetter(
        request_id="req-1", reason="delivered too often", num_delivered=5, died_s=1000.3, scheduler="scheduler-1"
    )
    messages = [
        *one_request(),
        captured(handed, "$KV.nj_lease.handed_back", 1000.2),
        captured(given_up, "nj.v1.dead.req-1", 1000.3),
    ]
    text = story_text(messages)
    assert "scheduler-0 → work queue" in text
    assert "GIVEN UP after 5 attempts: delivered too often" in text
    assert "does not know" not in text


def test_what_is_loaded_from_host_memory_is_told():
    path = whole_path()
    for message in path:
        for grant in message.body.get("grants", ()):
            grant["num_loaded"] = grant.get("num_cached", 0)
    assert "granted 1 blocks, 1 tokens are in them already, 1 of these once they are loaded" in story_text(path)
