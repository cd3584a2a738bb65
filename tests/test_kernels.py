"""The norm and the loss that replace torch's on a CPU."""

from unittest.mock import patch

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import few, seeds

from kernels import MAX_FLOAT32_LOGITS, cross_entropy, rms_norm

close = torch.testing.assert_close


@few
@given(
    leading=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    width=st.integers(1, 40),
    has_gains=st.booleans(),
    eps=st.sampled_from([None, 1e-5, 0.1]),
    seed=seeds,
)
def test_the_rms_norm_is_torchs_with_equal_gradients(leading, width, has_gains, eps, seed):
    torch.manual_seed(seed)
    x = torch.randn(*leading, width, dtype=torch.float64, requires_grad=True)
    gains = torch.randn(width, dtype=torch.float64, requires_grad=True) if has_gains else None
    y, expected = rms_norm(x, gains, eps), F.rms_norm(x, (width,), gains, eps)
    assert torch.allclose(y, expected) and torch.allclose(rms_norm(x.detach(), gains, eps), y)
    inputs = [x, gains] if has_gains else [x]
    direction = torch.randn_like(x)
    for a, b in zip(
        torch.autograd.grad(y, inputs, direction), torch.autograd.grad(expected, inputs, direction)
    ):
        assert torch.allclose(a, b)


@few
@given(
    N=st.integers(1, 40),
    V=st.integers(2, 30),
    max_float32_logits=st.integers(0, 200),
    share_without_target=st.sampled_from([0.0, 0.3, 0.9]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=seeds,
)
def test_the_loss_of_many_logits_is_torchs_with_equal_gradients(
    N, V, max_float32_logits, share_without_target, dtype, seed
):
    torch.manual_seed(seed)
    wider = (4 * torch.randn(N, V + 3)).to(dtype).requires_grad_()
    logits = wider[:, :V]  # the others are padding
    targets = torch.randint(V, (N,)).where(torch.rand(N) > share_without_target, -1)
    targets[0] = 1
    with patch.dict(MAX_FLOAT32_LOGITS, cpu=max_float32_logits):
        loss = cross_entropy(logits, targets)
    expected = F.cross_entropy(logits.float(), targets, ignore_index=-1)
    close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(0.25))
    (expected_gradient,) = torch.autograd.grad(expected, logits, torch.tensor(0.25))
    assert gradient.dtype == dtype
    rtol = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}[dtype]
    close(gradient, expected_gradient, rtol=rtol, atol=1e-6)


def test_gradients_of_many_logits_do_not_underflow_in_fp16():
    N, V, loss_scale = 8192, 16, 2.0**16
    torch.manual_seed(0)
    logits = torch.randn(N, V).half().requires_grad_()
    targets = torch.randint(V, (N,))
    with patch.dict(MAX_FLOAT32_LOGITS, cpu=1000):
        (loss_scale * cross_entropy(logits, targets)).backward()
    exact_logits = logits.detach().double().requires_grad_()
    (loss_scale * F.cross_entropy(exact_logits, targets)).backward()
    close(logits.grad.double(), exact_logits.grad, rtol=2**-9, atol=0)
