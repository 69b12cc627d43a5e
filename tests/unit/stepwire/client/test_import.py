import subprocess
import sys

import pytest

import stepwire
import stepwire.client


def test_import_stepwire_loads_nothing_heavy() -> None:
    code = "import sys, stepwire; print([m for m in ('grpc', 'google.protobuf', 'opentelemetry') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    assert out == "[]\n"


def test_the_client_does_without_the_services_packages() -> None:
    code = (
        "import sys; from stepwire import Client; "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'opentelemetry.sdk', 'structlog') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    assert out == "[]\n"


def test_every_name_is_the_clients() -> None:
    for name in stepwire.__all__:
        assert getattr(stepwire, name) is getattr(stepwire.client, name)
        assert name in dir(stepwire)
    with pytest.raises(AttributeError):
        getattr(stepwire, "nothing")  # noqa: B009
