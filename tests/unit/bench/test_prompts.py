"""Data sets have the asked lengths, are drawn again by the same seed, and say what is wrong with a file."""

import json

import pytest

from services.bench.prompts import FIRST_PLAIN_TOKEN, DatasetChoice, DatasetError, make_prompts


def lengths(prompts):
    return {len(prompt.content) for prompt in prompts}


def test_words_are_english_prompts_of_that_many_words():
    prompts = make_prompts(DatasetChoice(num_prompts=50, input_len=90))
    assert {len(prompt.content.split()) for prompt in prompts} == {90}
    assert all("{" not in prompt.content for prompt in prompts)


def test_no_two_english_prompts_begin_alike_so_that_no_prefix_is_shared():
    prompts = make_prompts(DatasetChoice(num_prompts=300))
    assert len({prompt.content[:60] for prompt in prompts}) > 290


def test_very_short_english_prompts_are_possible():
    assert lengths(make_prompts(DatasetChoice(num_prompts=1, input_len=1))) != {0}


def test_random_ids_have_the_length_and_avoid_special_tokens():
    prompts = make_prompts(DatasetChoice("random", num_prompts=20, input_len=30, vocab_size=40))
    assert lengths(prompts) == {30}
    assert {token for prompt in prompts for token in prompt.content} == set(range(FIRST_PLAIN_TOKEN, 40))


def test_the_range_ratio_spreads_input_and_output_lengths_around_their_means():
    prompts = make_prompts(DatasetChoice("random", num_prompts=400, input_len=100, output_len=10, range_ratio=0.2))
    assert (min(lengths(prompts)), max(lengths(prompts))) == (80, 120)
    assert {prompt.max_tokens for prompt in prompts} == {8, 9, 10, 11, 12}


def test_shared_prefixes_take_turns_and_are_followed_by_something_new():
    prompts = make_prompts(DatasetChoice("shared-prefix", num_prompts=6, input_len=5, prefix_len=20, num_prefixes=2))
    assert prompts[0].content[:20] == prompts[2].content[:20] != prompts[1].content[:20]
    assert len({prompt.content for prompt in prompts}) == 6
    assert lengths(prompts) == {25}


@pytest.mark.parametrize("dataset", ["words", "random", "shared-prefix"])
def test_the_same_seed_draws_the_same_prompts_and_another_seed_others(dataset):
    def draw(seed):
        return make_prompts(DatasetChoice(dataset, num_prompts=5, range_ratio=0.5, seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_file_gives_its_prompts_in_order_and_begins_again(tmp_path):
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "one"}, {"prompt": [5, 6], "max_tokens": 3}, {"messages": messages}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    prompts = make_prompts(DatasetChoice("file", num_prompts=4, output_len=7, file=file))
    assert [prompt.content for prompt in prompts] == ["one", (5, 6), "", "one"]
    assert [prompt.max_tokens for prompt in prompts] == [7, 3, 7, 7]
    assert prompts[2].messages == tuple(messages)


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"text": "x"}', '{"prompt": "x", "max_tokens": 0}', '{"prompt": 5}']
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(DatasetError, match="line 2"):
        make_prompts(DatasetChoice("file", file=file))


def test_a_file_that_is_missing_unreadable_or_empty_is_an_error(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("\n")
    for name, words in [(None, "Name the file"), ("none", "Cannot read"), ("binary", "UTF-8"), ("empty", "no prompt")]:
        with pytest.raises(DatasetError, match=words):
            make_prompts(DatasetChoice("file", file=name and tmp_path / name))


@pytest.mark.parametrize(
    "wrong", [{"range_ratio": 1.0}, {"range_ratio": -0.1}, {"dataset": "random", "vocab_size": 32}]
)
def test_impossible_choices_are_refused(wrong):
    with pytest.raises(DatasetError):
        make_prompts(DatasetChoice(**wrong))
