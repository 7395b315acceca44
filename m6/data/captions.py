"""The training captions of a text-to-image model: their text pieces, and their pairs of neighbouring characters.

The record shows whether the model knows the parts of a new caption. New combinations of known words are not reported,
because models compose them: an unseen colour of a known shape has no unknown piece or pair.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from m6.validation import Section

if TYPE_CHECKING:
    from m6.tokenizers.text import M6Tokenizer

_EXAMPLES, _FOUND, _INSTEAD = 8, 4, 3  # stored captions; findings and characters named in a message
_EDGE = ""  # stands before the first and after the last character of a caption


class SeenCaptions(Section):
    """The record of the training captions.

    Attributes:
        rows: number of captions.
        pieces: text pieces of the captions.
        following: for each character, its next characters in the captions, the commonest first. "" is the edge of a
            caption: as a key it lists first characters, in a list it is the end of a caption.
        examples: the commonest caption of each source.
    """

    format: Literal[1] = 1
    rows: int
    pieces: list[str]
    following: dict[str, list[str]]
    examples: list[str]

    def unseen(self, tokenizer: M6Tokenizer, caption: str) -> list[str]:
        """Describes each piece and each pair of characters of a caption without an example in training."""
        ids, known = tokenizer.encode_ids(caption), set(self.pieces)
        new = [piece for piece in _text_pieces(tokenizer, dict.fromkeys(ids)) if piece not in known]
        found, named = [_shown(piece) for piece in new], {*"".join(new).replace("▁", " ")}
        for first, second in dict.fromkeys(_pairs(tokenizer, ids)):
            follow = self.following.get(first, [])
            if second in follow or {first, second} & named:
                continue
            instead = ", ".join([_shown(each) for each in follow if each != _EDGE][:_INSTEAD])
            found.append(_place(first, second) + (f" (seen: {instead})" if instead else ""))
        return found

    def warning(self, tokenizer: M6Tokenizer, caption: str) -> str | None:
        """Returns a line about the unseen parts of a caption with advice; None if there are none."""
        found = self.unseen(tokenizer, caption)
        if not found:
            return None
        more = f" and {len(found) - _FOUND} more" if len(found) > _FOUND else ""
        such = f", such as {', '.join(self.examples)}" if self.examples else ""
        return (
            f'the caption "{caption}" has what no training caption has: {", ".join(found[:_FOUND])}{more}; the picture '
            f"may show something else. Use the words and the order of training captions{such}"
        )

    def with_those_of(self, other: SeenCaptions) -> SeenCaptions:
        """Returns the record of a model trained on the captions of both records; this one's come first."""
        keys = dict.fromkeys([*self.following, *other.following])
        return SeenCaptions(
            rows=self.rows + other.rows,
            pieces=sorted({*self.pieces, *other.pieces}),
            following={
                key: list(dict.fromkeys([*self.following.get(key, []), *other.following.get(key, [])])) for key in keys
            },
            examples=list(dict.fromkeys([*self.examples, *other.examples]))[:_EXAMPLES],
        )


def describe_captions(
    tokenizer: M6Tokenizer, sources: Mapping[str, Iterable[str]], max_tokens: int | None = None
) -> SeenCaptions:
    """Makes the record of the captions of each source, cut to ``max_tokens`` tokens as for the model."""
    pieces: set[str] = set()
    pairs: collections.Counter[tuple[str, str]] = collections.Counter()
    examples, rows = [], 0
    for captions in sources.values():
        counts = collections.Counter(captions)
        rows += counts.total()
        examples += [caption for caption, _ in counts.most_common(1)]
        for caption, count in counts.items():
            ids = tokenizer.encode_ids(caption, max_tokens)
            pieces.update(_text_pieces(tokenizer, ids))
            for pair in _pairs(tokenizer, ids):
                pairs[pair] += count
    following: dict[str, list[str]] = {}
    for (first, second), _ in sorted(pairs.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
        following.setdefault(first, []).append(second)
    return SeenCaptions(rows=rows, pieces=sorted(pieces), following=following, examples=examples[:_EXAMPLES])


def _text_pieces(tokenizer: M6Tokenizer, ids: Iterable[int]) -> list[str]:
    """The pieces of ids, without byte tokens (bytes of characters without a piece)."""
    model = tokenizer.sp_model
    return [model.id_to_piece(token) for token in ids if not model.is_byte(token)]


def _pairs(tokenizer: M6Tokenizer, ids: list[int]) -> list[tuple[str, str]]:
    """The pairs of neighbouring characters of a text, its edges included."""
    return list(itertools.pairwise([_EDGE, *tokenizer.sp_model.decode(ids), _EDGE]))


def _shown(piece: str) -> str:
    return piece.replace("▁", " ").strip() or "a space"


def _place(first: str, second: str) -> str:
    if first == _EDGE:
        return f"{_shown(second)} as the first character"
    return f"{'the end' if second == _EDGE else _shown(second)} after {_shown(first)}"
