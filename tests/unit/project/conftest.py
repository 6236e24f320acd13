"""The manifests for Kubernetes, put together once for each form."""

from __future__ import annotations

import pytest

from unit.project.manifests import FORMS, Manifests, kubectl, render


@pytest.fixture(autouse=True)
def _kubectl(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("kubectl") and kubectl() is None:
        pytest.skip(
            "needs kubectl 1.27 or newer, whose kustomize needs no cluster: "
            "https://kubernetes.io/docs/tasks/tools/"
        )


@pytest.fixture(params=FORMS, ids="+".join)
def form(request: pytest.FixtureRequest) -> Manifests:
    return render(*request.param)


@pytest.fixture
def gpu() -> Manifests:
    return render("gpu")
