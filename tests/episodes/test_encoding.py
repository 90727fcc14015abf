"""Long texts are encoded as they are, or known to be too long from their beginning."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.schema import Config
from headway.episodes.encoding import encoded
from headway.episodes.hosting import chats_of
from tests.episodes.program_episodes import RENDERER

TOKENIZER = RENDERER.tokenizer
PIECES = st.sampled_from(["word ", "a", " ", "é", "\n", "1234", "<|im_end|>", "\U0001f600", "\ud800", "==="])
TEXTS = st.lists(st.tuples(PIECES, st.integers(1, 400)), max_size=6).map(
    lambda parts: "".join(part * times for part, times in parts)
)


@given(text=TEXTS, most=st.integers(1, 300))
@settings(deadline=None)
def test_ids_are_all_of_the_text_where_it_fits_and_more_than_fit_where_not(text: str, most: int) -> None:
    whole, ids = encoded(TOKENIZER, text, None), encoded(TOKENIZER, text, most)
    assert ids.tolist() == whole.tolist() or min(len(ids), len(whole)) > most


def test_a_text_of_few_tokens_fits_whatever_its_length() -> None:
    longest = max((token for token in TOKENIZER.get_vocab() if token.isalpha() and token.isascii()), key=len)
    text = longest * 500
    whole = encoded(TOKENIZER, text, None)
    assert encoded(TOKENIZER, text, len(whole)).tolist() == whole.tolist()


def test_the_chats_of_a_run_encode_no_more_than_its_limits_need() -> None:
    data = {"task": {"name": "sort"}, "max_prompt_length": 100, "max_response_length": 20}
    renderer = chats_of(Config.model_validate({"data": data}), TOKENIZER).renderer
    assert 120 < len(renderer.encode("word " * 100_000)) < 1000
