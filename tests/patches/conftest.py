"""What tests of our own backend for compiled steps share."""

import pytest
import torch

from replay_transformers.patches import capture
from tests.support.captures import Recorder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Everything is captured that runs on one device, by a stand-in."""
    stand_in = Recorder()
    monkeypatch.setattr(capture, "record", stand_in)
    monkeypatch.setattr(capture, "is_capturable", lambda inputs: all(map(torch.is_tensor, inputs)))
    return stand_in
