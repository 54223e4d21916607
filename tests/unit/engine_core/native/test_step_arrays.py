from engine_core.batch import Row, Sampling
from engine_core.native.step_arrays import arrays_of, last_tokens

SAMPLING = Sampling(position=0, seed=0)
ROWS = [
    Row((7, 8, 9), 4, (3, 1), 10, SAMPLING),
    Row((5,), 0, (2,), 1),
    Row((6, 4), 1, (0, 9, 8), 3, SAMPLING),
]


def test_rows_are_laid_one_after_another():
    arrays = arrays_of(ROWS, last_tokens(ROWS), [True, True])
    assert arrays.tokens.tolist() == [7, 8, 9, 5, 6, 4]
    assert arrays.first_token.tolist() == [0, 3, 4, 6]
    assert arrays.start.tolist() == [4, 0, 1]
    assert arrays.blocks.tolist() == [3, 1, 2, 0, 9, 8]
    assert arrays.first_block.tolist() == [0, 2, 3, 6]
    assert arrays.output_tokens.tolist() == [2, 5]


def test_only_outputs_that_want_logits_get_a_row_of_them():
    assert arrays_of(ROWS, [0, 2, 5], [False, True, True]).logits_row.tolist() == [-1, 0, 1]


def test_no_rows_make_empty_arrays():
    arrays = arrays_of([], [], [])
    assert arrays.first_token.tolist() == [0]
    assert len(arrays.tokens) == len(arrays.output_tokens) == 0
