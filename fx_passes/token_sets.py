"""Sets of token ids: listed, or found by what each token decodes to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plain import join, plain, suggestion
from eyesplice.ops.layout import INT32_MAX

RULES: Final[dict[str, Callable[[str, str], bool]]] = {
    "decoded_endswith": str.endswith,
    "decoded_contains": str.__contains__,
}
"""Each rule's test of a token's text against the rule's text."""

MAX_RULE_TEXT: Final = 256
_CORRECT: Final = "correct the token set"
_WORD_START: Final = "\u2581"
"""SentencePiece's mark of a space before a token, which decoding one token drops."""


def check_token_set(value: object, path: str) -> list[int] | dict[str, str]:
    """The token set in its one form: ascending ids, or an object of one rule.

    Args:
        value: `[198, 271]`, `{"decoded_endswith": text}` or `{"decoded_contains": text}`.
        path: where it stands, for the error.

    Raises:
        SpecError: anything else.
    """
    found = plain(value, path)
    match found:
        case [*ids] if ids:
            for i, token in enumerate(ids):
                if isinstance(token, bool) or not isinstance(token, int):
                    _refuse(join(path, i), token)
                if not 0 <= token <= INT32_MAX:
                    _refuse(join(path, i), token)
            return sorted(set(ids))
        case dict() if len(found) == 1:
            ((rule, text),) = found.items()
            if rule not in RULES:
                _refuse(path, value, suggestion(rule, RULES, _CORRECT))
            if not isinstance(text, str) or not 0 < len(text) <= MAX_RULE_TEXT:
                _refuse(join(path, rule), text)
            return {rule: text}
    _refuse(path, value)


def _refuse(path: str, value: object, remedy: str = _CORRECT) -> NoReturn:
    raise SpecError(
        path,
        value,
        'a list of token ids, {"decoded_endswith": text} or {"decoded_contains": text}, '
        f"text of 1 to {MAX_RULE_TEXT} characters",
        remedy,
    )


def resolve_all(
    token_sets: Mapping[str, object], tokenizer: Any, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """The token ids of each set by name, ascending.

    The vocabulary is decoded once, if at all.

    Args:
        token_sets: by name, each as in `check_token_set`.
        tokenizer: with `decode`, as Hugging Face's and vLLM's have.
        vocab_size: token ids are 0 to vocab_size - 1.

    Raises:
        SpecError: malformed, an id out of range, or a rule that no token fits; the
            message names the set.
    """
    resolved: dict[str, tuple[int, ...]] = {}
    texts: Sequence[str] | None = None
    for name, value in token_sets.items():
        checked = check_token_set(value, name)
        if isinstance(checked, dict):
            texts = texts or decoded_vocabulary(tokenizer, vocab_size)
            checked = _fitting(checked, texts, name)
        if checked[-1] >= vocab_size:
            raise SpecError(
                name,
                checked[-1],
                f"token ids 0..{vocab_size - 1} of this model",
                "use the ids of this model's tokenizer",
            )
        resolved[name] = tuple(checked)
    return resolved


def _fitting(rule: dict[str, str], texts: Sequence[str], name: str) -> list[int]:
    ((kind, wanted),) = rule.items()
    ids = [i for i, text in enumerate(texts) if RULES[kind](text, wanted)]
    if not ids:
        raise SpecError(
            name,
            rule,
            f"a text that some token fits; none of {len(texts)} does",
            "change the text, or list token ids",
        )
    return ids


def decoded_vocabulary(tokenizer: Any, vocab_size: int) -> tuple[str, ...]:
    """What each token id decodes to by itself, "" for ids that the tokenizer lacks.

    Special tokens count by their text. Bytes that are a part of a character decode to
    U+FFFD and leave the rest of the token's text as it is.
    """
    return tuple(_decoded(tokenizer, token) for token in range(vocab_size))


def _decoded(tokenizer: Any, token: int) -> str:
    try:
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        (piece,) = tokenizer.convert_ids_to_tokens([token])
    # Vocabularies are padded, and tokenizers differ in what they say to an unknown id.
    except Exception:
        return ""
    if isinstance(piece, str) and piece.startswith(_WORD_START):
        return text if text.startswith(" ") else f" {text}"
    return text
