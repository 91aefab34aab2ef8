"""Captured rows from the engine core's process to the front end's.

vLLM's encoder sends an array as a message part of its own, next to the message, which has
its dtype, shape and number among the parts. Its decoder puts the array back where a field
is declared to be one. Ours are inside an object: `with_arrays` puts them back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyesplice.integration.config import KEY


def decode(
    original: Callable[..., Any], decoder: Any, bufs: Any, *args: Any, **kwargs: Any
) -> Any:
    """vLLM's `MsgpackDecoder.decode`, with the captured rows of the outputs."""
    message = original(decoder, bufs, *args, **kwargs)
    # Most have one part: then there is no array, or it is small and inside.
    if isinstance(bufs, Sequence) and len(bufs) > 1:
        for output in getattr(message, "outputs", None) or ():
            params = output.kv_transfer_params
            if params and KEY in params:
                with_arrays(params[KEY], bufs)
    return message


def with_arrays(plain: Any, parts: Sequence[Any]) -> None:
    """Put arrays back for the numbers of parts in what `RawAnswer.to_plain` gave.

    Anything else is left as it is: a KV connector could send a client's words back under
    our key.

    Args:
        plain: changed in place.
        parts: of the message.
    """
    captures = plain.get("captures") if isinstance(plain, dict) else None
    for captured in captures if isinstance(captures, list) else ():
        for array in captured if isinstance(captured, list) else ():
            if _is_elsewhere(array) and 0 < array[2] < len(parts):
                array[2] = parts[array[2]]


def _is_elsewhere(array: Any) -> bool:
    """Whether it is an array whose data is a part of its own."""
    return isinstance(array, list) and len(array) == 3 and isinstance(array[2], int)


def array_of(sent: Any) -> NDArray[Any]:
    """An array that was sent, over its buffer; in one process it is itself.

    A small one is a copy: it came inside the message, which it would keep whole.
    """
    if isinstance(sent, np.ndarray):
        return sent
    dtype, shape, data = sent
    found = np.frombuffer(data, dtype).reshape(shape)
    return found.copy() if isinstance(data, memoryview) else found
