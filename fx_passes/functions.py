"""The reads and writes of one request: their names, their order, what gates can name."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from eyesplice._errors import SpecError
from eyesplice.fx_passes.gates import Reference, Resolve, ScoreKey, parse_gate
from eyesplice.fx_passes.kernels import SCORE_KERNELS
from eyesplice.fx_passes.marked import normalise, replaced
from eyesplice.fx_passes.plain import did_you_mean
from eyesplice.fx_passes.reads import Read
from eyesplice.fx_passes.sites import Site
from eyesplice.fx_passes.writes import Write

Function: TypeAlias = Read | Write


def names_of(functions: Iterable[Function]) -> tuple[str, ...]:
    """The name of each function in answers: its own, or `reads/0`, `writes/1`."""
    return tuple(
        function.name or place for function, place in _numbered(functions, "{}/{}")
    )


def paths_of(functions: Iterable[Function]) -> tuple[str, ...]:
    """What errors call each function: an app's by its name, else `writes[0]`."""
    return tuple(
        place if function.app is None else str(function.name)
        for function, place in _numbered(functions, "{}[{}]")
    )


def _numbered(
    functions: Iterable[Function], form: str
) -> Iterable[tuple[Function, str]]:
    """Each function, and where it stands among the request's own of its kind."""
    counts = {"reads": 0, "writes": 0}
    for function in functions:
        kind = "reads" if isinstance(function, Read) else "writes"
        yield function, form.format(kind, counts[kind])
        counts[kind] += function.app is None


def sites_of(function: Function) -> tuple[Site, ...]:
    """The sites of a function, in the order of the forward pass."""
    return tuple(Site(layer, function.submodule) for layer in function.layers)


def check_names(functions: Sequence[Function]) -> None:
    """Refuse two functions of one name where an answer or a gate goes by names.

    Raises:
        SpecError: a read, or a function with a gate, shares its name.
    """
    names, paths = names_of(functions), paths_of(functions)
    seen: dict[str, Function] = {}
    for function, name, path in zip(functions, names, paths, strict=True):
        pair = (function, seen.setdefault(name, function))
        if pair[0] is not pair[1] and any(isinstance(f, Read) or f.gate for f in pair):
            raise SpecError(
                f"{path}.name",
                name,
                "one name for each read and each function with a gate",
                "use another name",
            )


def resolver(
    functions: Sequence[Function], app: str | None, num_layers: int
) -> Resolve:
    """How the gates of an app's functions, or of a request's own, find their scores.

    Args:
        functions: those of the request.
        app: the app, whose reads it may name without the app's name, or None.
        num_layers: decoder layers of the model.
    """
    names = [normalise(name) for name in names_of(functions)]
    reads = [i for i, f in enumerate(functions) if isinstance(f, Read)]
    own = [i for i in reads if functions[i].app == app]
    visible = reads if app is None else own

    def resolve(reference: Reference) -> ScoreKey:
        wanted = (reference.name, f"{app}/{reference.name}" if app else None)
        named = [i for i in visible if names[i] in wanted]
        if named:
            index = named[0]
        else:
            shown = ", ".join(
                f"{names[i]} ({functions[i].kernel} at {_layers(functions[i])})"
                for i in visible
            )
            there = f": there are {shown}" if shown else ": nothing is read"
            index = _of_kernel(reference, functions, own, there, num_layers)
        read = functions[index]
        assert isinstance(read, Read)
        if not read.scores:
            raise LookupError(f"a {read.kernel} has no score")
        layer = _layer(reference, read, num_layers)
        return ScoreKey(index, layer, _feature(reference, read))

    return resolve


def qualified(
    text: str, functions: Sequence[Function], app: str | None, num_layers: int
) -> str:
    """The gate single-spaced, its reads under full names and with their layers.

    Raises:
        SpecError: as `parse_gate`.
    """
    resolve = resolver(functions, app, num_layers)
    names = names_of(functions)
    spans = []

    def rename(reference: Reference) -> ScoreKey:
        key = resolve(reference)
        read = functions[key.read]
        layer = f"(layer={key.layer})" if len(read.layers) > 1 else ""
        spans.append((*reference.span, _quoted(names[key.read]) + layer))
        return key

    source = normalise(text)
    parse_gate(source, rename)
    return replaced(source, spans)


def _quoted(name: str) -> str:
    name = normalise(name)
    quote = "'" if '"' in name else '"'
    if quote in name or "\\" in name:
        raise LookupError(f"gates cannot name {name!r}: rename it")
    return f"{quote}{name}{quote}"


def _of_kernel(
    reference: Reference,
    functions: Sequence[Function],
    own: Sequence[int],
    there: str,
    num_layers: int,
) -> int:
    """The one read of a kernel at a layer; `there` says which reads there are."""
    if reference.name not in SCORE_KERNELS:
        own_names = (str(functions[i].name).rpartition("/")[2] for i in own)
        near = did_you_mean(reference.name, own_names)
        raise LookupError(
            "unknown read" + (f", did you mean {near}?" if near else there)
        )
    if reference.layer is None:
        raise LookupError(f"say which: {reference.name}(layer=N)")
    layer = _in_model(reference.layer, num_layers)
    found = [
        i
        for i in own
        if functions[i].kernel == reference.name and layer in functions[i].layers
    ]
    if len(found) != 1:
        many = "no" if not found else "more than one"
        raise LookupError(f"{many} {reference.name} at layer {layer}{there}")
    return found[0]


def _layers(function: Function) -> str:
    return ", ".join(map(str, function.layers))


def _layer(reference: Reference, read: Read, num_layers: int) -> int:
    if reference.layer is None:
        if len(read.layers) > 1:
            raise LookupError(
                f"say which: {reference.name}(layer=N), one of {_layers(read)}"
            )
        return read.layers[0]
    layer = _in_model(reference.layer, num_layers)
    if layer not in read.layers:
        raise LookupError(f"it reads at {_layers(read)}, not at layer {layer}")
    return layer


def _in_model(layer: int, num_layers: int) -> int:
    if not -num_layers <= layer < num_layers:
        raise LookupError(f"layers are 0..{num_layers - 1}, or negative from the end")
    return layer % num_layers


def _feature(reference: Reference, read: Read) -> int:
    if reference.feature is None:
        if read.scores > 1:
            raise LookupError(
                f"say which of {read.scores} features: {reference.name}[i]"
            )
        return 0
    if reference.feature >= read.scores:
        raise LookupError(f"it has the features 0..{read.scores - 1}")
    return reference.feature
