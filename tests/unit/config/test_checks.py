"""Whether a model can read and write the codes of an image tokenizer."""

import pytest

from m6.architecture.configuration import M6Config
from m6.config.checks import check_codes_fit
from m6.errors import UserError


def test_codes_without_room_or_of_another_grid_are_refused():
    model = M6Config(image_vocab_size=8, code_grid_size=3)
    check_codes_fit(model, 8, 9)
    with pytest.raises(UserError, match=r"9 codes, but the model's image_vocab_size is 8.*--image-vocab-size 9"):
        check_codes_fit(model, 9, 9)
    with pytest.raises(UserError, match=r"grid of 16 codes, but the model's code_grid_size is 3: pretrain one with 4"):
        check_codes_fit(model, 8, 16)
    check_codes_fit(M6Config(image_vocab_size=8), 8, 16)


def test_codebooks_that_the_model_would_divide_otherwise_are_refused():
    books = M6Config(image_vocab_size=8, codes_per_place=2)
    check_codes_fit(books, 8, 32, 2)
    with pytest.raises(UserError, match=r"has 6 codes in 2 codebooks, .* is 8: .* --image-vocab-size 6"):
        check_codes_fit(books, 6, 32, 2)
    with pytest.raises(UserError, match="has 1 codes at each place, but the model's codes_per_place is 2"):
        check_codes_fit(books, 8, 16)
    with pytest.raises(UserError, match=r"has 10 codes, .* or train an image tokenizer with model.codebook_size 4$"):
        check_codes_fit(books, 10, 32, 2)
