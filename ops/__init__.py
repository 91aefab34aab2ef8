"""Torch ops spliced into the compiled graph: contracts, reference, Triton kernels.

Importing this room registers the ops' schemas, fakes and CPU implementations. Triton
is imported when a CUDA tensor first reaches an op.
"""

if __name__ != "eyesplice.ops":
    raise ImportError(
        f"import eyesplice.ops, not {__name__}: a second copy registers the ops twice"
    )

from eyesplice.ops import contracts as _contracts  # noqa: F401 - registers the ops
