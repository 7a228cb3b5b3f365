"""What an operator refuses to write to."""

import pytest
import torch


def assert_refused(call, tensor, words):
    """``call`` of the tensor raises a RuntimeError in these words, and has written nothing."""
    kept = tensor.detach().clone()
    with pytest.raises(RuntimeError, match=words):
        call(tensor)
    assert torch.equal(tensor, kept)


def assert_written_in_inference_mode(call, tensor):
    """A tensor that was made in inference mode is written in this mode."""
    kept = tensor.clone()
    with torch.inference_mode():
        call(tensor)
        assert not torch.equal(tensor, kept)
