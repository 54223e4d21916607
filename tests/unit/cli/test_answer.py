"""What a person is told of an answer beside its text."""

from services.cli.answer import Answer


def test_a_model_that_says_nothing_is_remarked_upon_and_a_text_is_not() -> None:
    assert "ended its answer at once" in Answer(finish_reason="stop").remark()
    assert Answer(text="A toad.", finish_reason="stop").remark() == ""
