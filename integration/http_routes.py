"""The routes under /v1/eyesplice, on the server's own app and behind its API key."""

from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Final, NoReturn

from fastapi import APIRouter, FastAPI, HTTPException, Request

from eyesplice._errors import SpecError
from eyesplice._version import __version__
from eyesplice.fx_passes.context import VectorInfo
from eyesplice.fx_passes.report import SiteRow
from eyesplice.integration import beams, http_answers, http_other_answers, ledger
from eyesplice.integration.deployed import AppStatus, Deployed, deployed

_ROOT: Final = "/v1/eyesplice"

router = APIRouter(prefix=_ROOT)


def attach() -> None:
    """Arrange that the server of this process, once it is made, has the routes."""
    from eyesplice.integration.plugin import wrap

    wrap(ledger.GENERATE_ROUTES, _add_to)


def _add_to(original: Callable[..., Any], app: FastAPI) -> Any:
    result = original(app)
    app.include_router(router)
    http_answers.attach()
    http_other_answers.attach()
    beams.attach_to_server()
    return result


def _handle(request: Request) -> Deployed:
    try:
        return deployed(request.app.state.engine_client)
    except SpecError as error:
        _refuse(HTTPStatus.NOT_FOUND, str(error))


def _refuse(status: HTTPStatus, message: str) -> NoReturn:
    raise HTTPException(status_code=status.value, detail=message)


def _app(handle: Deployed, name: str) -> AppStatus:
    for status in handle.apps():
        if status.name == name:
            return status
    names = ", ".join(status.name for status in handle.apps()) or "none"
    _refuse(HTTPStatus.NOT_FOUND, f"no app {name!r} is deployed; deployed: {names}")


@router.get("")
def overview(request: Request) -> dict[str, Any]:
    """Version, sites, apps and the use of the bank."""
    handle = _handle(request)
    rows = handle.sites()
    used, total = handle.bank_use()
    missing = sum(row.form is None for row in rows)
    return {
        "version": __version__,
        "sites": {"armed": len(rows) - missing, "missing": missing},
        "apps": [asdict(status) for status in handle.apps()],
        "bank": {"rows": total, "used": used},
    }


@router.get("/sites")
def sites(request: Request) -> dict[str, Any]:
    """The site table."""
    return {"sites": [_site(row) for row in _handle(request).sites()]}


def _site(row: SiteRow) -> dict[str, Any]:
    fields = asdict(row)
    fields.pop("site")
    place = {"layer": row.site.layer, "submodule": row.site.submodule}
    return {**place, "alias": row.site.alias, **fields}


@router.get("/vectors")
def vectors(request: Request) -> dict[str, Any]:
    """Every registered vector."""
    return {"vectors": [_vector(info) for info in _handle(request).vectors()]}


@router.get("/vectors/{name:path}")
def vector(request: Request, name: str) -> dict[str, Any]:
    """One vector; a tensor of an app is `app/tensor`."""
    for info in _handle(request).vectors():
        if info.name == name:
            return _vector(info)
    _refuse(HTTPStatus.NOT_FOUND, f"no vector {name!r} is registered")


def _vector(info: VectorInfo) -> dict[str, Any]:
    return {"name": info.name, "digest": info.digest, "shape": list(info.shape)}


@router.get("/apps")
def apps(request: Request) -> dict[str, Any]:
    """Every deployed app."""
    return {"apps": [asdict(status) for status in _handle(request).apps()]}


@router.get("/apps/{name}")
def app(request: Request, name: str) -> dict[str, Any]:
    """One deployed app."""
    return asdict(_app(_handle(request), name))


@router.post("/apps/{name}/enable")
def enable(request: Request, name: str) -> dict[str, Any]:
    """Let new requests name an app."""
    return _switch(request, name, Deployed.enable)


@router.post("/apps/{name}/disable")
def disable(request: Request, name: str) -> dict[str, Any]:
    """Refuse an app to new requests."""
    return _switch(request, name, Deployed.disable)


def _switch(
    request: Request, name: str, switch: Callable[[Deployed, str], None]
) -> dict[str, Any]:
    handle = _handle(request)
    _app(handle, name)
    servers = getattr(request.app.state.args, "api_server_count", None) or 1
    if servers > 1:
        _refuse(
            HTTPStatus.CONFLICT,
            f"{servers} API servers share this engine and only one would know; "
            "start it with --api-server-count 1 to switch apps",
        )
    switch(handle, name)
    return asdict(_app(handle, name))


@router.put("/vectors/{name:path}")
@router.delete("/vectors/{name:path}")
@router.put("/apps/{name}")
@router.delete("/apps/{name}")
def register(request: Request, name: str) -> None:
    """Registration at run time: not in this version."""
    if not _handle(request).allows_registration:
        _refuse(
            HTTPStatus.FORBIDDEN,
            "registration over HTTP is switched off (allow_registration is false), and "
            "this version has none yet: name apps and vectors in the configuration and "
            "restart the engine",
        )
    _refuse(
        HTTPStatus.NOT_IMPLEMENTED,
        "this version has no registration over HTTP: name apps and vectors in the "
        "configuration and restart the engine",
    )
