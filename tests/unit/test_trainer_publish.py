"""Tensors become host bytes without a copy where none is needed, and the same bytes in any case."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.publish import DTYPES, HostViews


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_keeps_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    view = HostViews().of({"t": tensor})["t"]
    assert view.dtype == DTYPES[dtype]
    assert view.shape == (2, 3)
    assert torch.equal(torch.frombuffer(bytearray(view.data), dtype=dtype).reshape(view.shape), tensor)


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(3)
    view = HostViews().of({"t": tensor})["t"]
    tensor += 1
    assert view.data.view(np.float32).tolist() == [1.0, 1.0, 1.0]


def test_a_strided_tensor_is_sent_in_the_order_of_its_shape() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    view = HostViews().of({"t": tensor})["t"]
    assert view.shape == (3, 2)
    assert view.data.view(np.float32).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_parameters_and_scalars_are_taken() -> None:
    views = HostViews().of({"p": torch.nn.Parameter(torch.ones(2)), "s": torch.tensor(7.0)})
    assert views["p"].data.nbytes == 8
    assert views["s"].shape == ()
    assert views["s"].data.nbytes == 4
