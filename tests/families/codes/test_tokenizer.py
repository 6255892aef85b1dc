"""The tokenizer on the device: codes to actions."""

import numpy as np
import pytest

from specact.families.codes.policy import ActionTokenizer


def make(books: int, codes: int = 4, chunk: int = 3, actions: int = 2) -> tuple[ActionTokenizer, np.ndarray]:
    rng = np.random.default_rng(books)
    tokenizer = ActionTokenizer(
        table=rng.normal(size=(codes**books, chunk, actions)).astype(np.float32),
        centre=np.array([1.0, -2.0], np.float32),
        scale=np.array([0.5, 3.0], np.float32),
        fingerprint="none",
        codes=codes,
    )
    return tokenizer, rng.normal(size=(books, codes, chunk, actions)).astype(np.float32)


@pytest.mark.parametrize("books", [1, 2, 3])
def test_decodes_to_the_table_entry_plus_the_chosen_offsets(books: int) -> None:
    tokenizer, offsets = make(books)
    table, before = tokenizer.table.copy(), offsets.copy()
    for place, codes in enumerate(np.ndindex((4,) * books)):  # the first codebook is the slowest index
        actions = tokenizer.decode(np.array(codes), offsets)
        wanted = table[place] + sum(before[book, code] for book, code in enumerate(codes))
        np.testing.assert_allclose(actions, wanted, atol=1e-5)
        assert actions.shape == (3, 2) and actions.dtype == np.float32
        actions[:] = 7.0  # it is a copy


def test_environment_units_are_clipped_to_what_was_demonstrated() -> None:
    tokenizer, _ = make(1)
    normalised = np.array([[0.0, 0.0], [1.0, -1.0], [0.5, 0.5], [9.0, -9.0], [-1.01, 1.01]], np.float32)
    kept = normalised.copy()
    actions = tokenizer.to_environment(normalised)
    np.testing.assert_allclose(actions, [[1.0, -2.0], [1.5, -5.0], [1.25, -0.5], [1.5, -5.0], [0.5, 1.0]], atol=1e-6)
    np.testing.assert_array_equal(normalised, kept)
    np.testing.assert_array_equal(tokenizer.to_environment(normalised[3]), actions[3])  # one action as well as many
    assert actions.dtype == np.float32
