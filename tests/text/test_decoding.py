"""Decoders written out and read again."""

import json

import pytest
from tokenizers import Tokenizer, models

from mlxserve.text.decoding import Decoding, make_decoder, parse_decoder

KINDS = [
    Decoding(byte_level=True),
    Decoding(byte_fallback=True, replacements=(("\u2581", " "),)),
    Decoding(byte_fallback=True, replacements=(("\u2581", " "),), stripped_at_start=1),
    Decoding(replacements=(("_", " "), ("+", "-"))),
]


@pytest.mark.parametrize("decoding", KINDS, ids=str)
def test_a_decoder_is_read_as_what_it_was_made_of(decoding):
    backend = Tokenizer(models.BPE())
    backend.decoder = make_decoder(decoding)
    assert parse_decoder(json.loads(backend.to_str())["decoder"]) == decoding


def test_a_mark_that_only_the_first_token_loses_is_refused():
    with pytest.raises(ValueError, match="drops '_'"):
        make_decoder(Decoding(replacements=(("_", " "),), dropped_at_start="_"))
