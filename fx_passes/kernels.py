"""The kernels of the language: their names, and which fields belong to each."""

from typing import Final, Literal, TypeVar, get_args

from eyesplice._errors import SpecError
from eyesplice.fx_passes.plain import suggestion

Kind = Literal["read", "write"]

WriteKernel = Literal[
    "steering_vector",
    "ablate",
    "clamp",
    "one_sided",
    "affine",
    "replace",
    "mask",
    "feature_clamp",
    "router",
]
ReadKernel = Literal[
    "capture",
    "probe",
    "dot",
    "cosine",
    "norm",
    "sae",
    "router",
    "distance",
    "tanh_cosine",
]
WRITE_KERNELS: Final[tuple[WriteKernel, ...]] = get_args(WriteKernel)
READ_KERNELS: Final[tuple[ReadKernel, ...]] = get_args(ReadKernel)

_VECTOR: Final = ("vector", "scale", "preserve_norm")
_SCORE: Final = ("reduce", "over")

WRITE_FIELDS: Final[dict[WriteKernel, tuple[str, ...]]] = {
    "steering_vector": _VECTOR,
    "ablate": _VECTOR,
    "clamp": (*_VECTOR, "lo", "hi"),
    "one_sided": (*_VECTOR, "offset"),
    "affine": ("u", "v", "bias", "function", "scale", "preserve_norm"),
    "replace": _VECTOR,
    "mask": _VECTOR,
    "feature_clamp": (*_VECTOR, "weight", "bias", "threshold", "value"),
    "router": ("activate", "deactivate", "epsilon"),
}
"""The fields that belong to a kernel, besides those that every write has."""

READ_FIELDS: Final[dict[ReadKernel, tuple[str, ...]]] = {
    "capture": (),
    "probe": ("weight", "bias", "function", *_SCORE),
    "dot": ("weight", *_SCORE),
    "cosine": ("weight", *_SCORE),
    "norm": _SCORE,
    "sae": ("weight", "bias", "function", "threshold", *_SCORE),
    "router": ("top_k",),
    "distance": ("weight", *_SCORE),
    "tanh_cosine": ("weight", *_SCORE),
}

FIELDS: Final[dict[Kind, dict[str, tuple[str, ...]]]] = {
    "read": {kernel: READ_FIELDS[kernel] for kernel in READ_KERNELS},
    "write": {kernel: WRITE_FIELDS[kernel] for kernel in WRITE_KERNELS},
}

OWN_OP_FIELDS: Final = ("weight", "scale")
"""The fields of a user's own op."""

TENSOR_FIELDS: Final = ("vector", "weight", "u", "v")
"""Fields that name a tensor. `bias` does too where it is a string."""

SCORE_KERNELS: Final = tuple(k for k in READ_KERNELS if "reduce" in READ_FIELDS[k])
"""The reads that make numbers, which gates can compare."""

FUNCTIONS: Final[dict[tuple[Kind, str], tuple[str, ...]]] = {
    ("write", "affine"): ("identity", "relu", "sigmoid", "step"),
    ("read", "probe"): ("identity", "sigmoid"),
    ("read", "sae"): ("relu", "identity", "jump_relu"),
}
"""What `function` may be, the default first."""


K = TypeVar("K", bound=str)


def known_kernel(kind: Kind, name: str, known: tuple[K, ...], note: str = "") -> K:
    """The kernel of this name.

    Raises:
        SpecError: there is none; `note` follows the list of those there are.
    """
    for kernel in known:
        if name == kernel:
            return kernel
    raise SpecError(
        kind,
        name,
        f"the {kind} kernels {', '.join(known)}{note}",
        suggestion(name, known, "use one of these kernels"),
    )


def fields_of(kind: Kind, kernel: str) -> tuple[str, ...]:
    """The fields that belong to a kernel or to a user's own op."""
    return OWN_OP_FIELDS if is_own_op(kernel) else FIELDS[kind][kernel]


def is_own_op(name: str) -> bool:
    """Whether a kernel's name is that of a user's own op, `lib::op`."""
    library, mark, op = name.partition("::")
    return bool(mark) and library.isidentifier() and op.isidentifier()
