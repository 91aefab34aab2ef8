"""The routes without a server: what each one hands over and how it refuses."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from eyesplice import SpecError
from eyesplice.fx_passes.context import VectorInfo
from eyesplice.fx_passes.report import SiteRow
from eyesplice.fx_passes.sites import Site
from eyesplice.integration import http_routes
from eyesplice.integration.deployed import AppStatus


class Engine:
    """Stands for `Deployed`."""

    def __init__(self):
        self.enabled, self.allows_registration = {"a": True}, False

    def apps(self):
        return tuple(
            AppStatus(name, on, False, (f"{name}/0",), "sha256:1")
            for name, on in self.enabled.items()
        )

    def sites(self):
        missing = SiteRow(Site(1, "router.logits"), None, reason="no experts")
        return SiteRow(Site(0, "mlp.post"), "fused", "mul", "[s1, 8]"), missing

    def vectors(self):
        return (VectorInfo("a/v", "sha256:2", (8,)),)

    def bank_use(self):
        return 2, 64


@pytest.fixture
def engine(monkeypatch):
    found = Engine()
    monkeypatch.setattr(http_routes, "deployed", lambda _: found)

    def switch(to):
        return lambda handle, name: handle.enabled.update({name: to})

    monkeypatch.setattr(http_routes.Deployed, "enable", switch(True))
    monkeypatch.setattr(http_routes.Deployed, "disable", switch(False))
    return found


@pytest.fixture
def client():
    app = FastAPI()
    app.include_router(http_routes.router)
    app.state.engine_client = None
    app.state.args = SimpleNamespace(api_server_count=1)
    return TestClient(app)


def get(client, path=""):
    answer = client.get("/v1/eyesplice" + path)
    assert answer.status_code == 200
    return answer.json()


def test_what_there_is(engine, client):
    app = {
        "name": "a",
        "enabled": True,
        "default": False,
        "functions": ["a/0"],
        "digest": "sha256:1",
    }
    found = get(client)
    assert found["sites"] == {"armed": 1, "missing": 1}
    assert found["bank"] == {"rows": 64, "used": 2}
    assert found["apps"] == get(client, "/apps")["apps"] == [app]
    assert get(client, "/apps/a") == app
    vector = {"name": "a/v", "digest": "sha256:2", "shape": [8]}
    assert (
        get(client, "/vectors")["vectors"] == [get(client, "/vectors/a/v")] == [vector]
    )
    first, second = get(client, "/sites")["sites"]
    assert first == {
        "layer": 0,
        "submodule": "mlp.post",
        "alias": "blocks.0.hook_mlp_out",
        "form": "fused",
        "node": "mul",
        "shape": "[s1, 8]",
        "reason": None,
        "custom": [],
    }
    assert (second["form"], second["reason"]) == (None, "no experts")


def test_switches(engine, client):
    answer = client.post("/v1/eyesplice/apps/a/disable")
    assert answer.json()["enabled"] is False and not engine.enabled["a"]
    assert client.post("/v1/eyesplice/apps/a/enable").json()["enabled"] is True


def test_a_switch_that_only_one_server_would_know_of_is_refused(engine, client):
    client.app.state.args.api_server_count = 2
    answer = client.post("/v1/eyesplice/apps/a/disable")
    assert answer.status_code == 409 and "--api-server-count" in answer.text
    assert engine.enabled["a"]


@pytest.mark.parametrize(("allowed", "status"), [(False, 403), (True, 501)])
@pytest.mark.parametrize("path", ["/apps/a", "/vectors/a/v", "/vectors/new"])
def test_registration(engine, client, path, allowed, status):
    engine.allows_registration = allowed
    for method in ("PUT", "DELETE"):
        answer = client.request(method, "/v1/eyesplice" + path)
        assert answer.status_code == status
        assert "in the configuration and restart the engine" in answer.text


@pytest.mark.parametrize("path", ["/apps/b", "/vectors/b", "/vectors/a"])
def test_what_is_not_there(engine, client, path):
    assert client.get("/v1/eyesplice" + path).status_code == 404


def test_an_engine_without_eyesplice(client, monkeypatch):
    def refuse(_engine):
        raise SpecError("engine", "x", "one with eyesplice", "switch it on")

    monkeypatch.setattr(http_routes, "deployed", refuse)
    answer = client.get("/v1/eyesplice")
    assert answer.status_code == 404 and "switch it on" in answer.text
