from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fastapi.testclient import TestClient
from weather_app import create_app

from aioserve.testing import FakeModel


@pytest.fixture
def client_of() -> Iterator[Callable[..., TestClient]]:
    """Make a client of the app with a model and options of the engine.

    The engine lives as long as the test.
    """
    with ExitStack() as stack:

        def make(model: FakeModel, **options: Any) -> TestClient:
            return stack.enter_context(TestClient(create_app(model, **options)))

        yield make
