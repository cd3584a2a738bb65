"""The norm and the loss that replace torch's on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import few, seeds
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import cross_entropy, rms_norm

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
    assert torch.allclose(y, expected)
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
    logits = (4 * torch.randn(N, V)).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,)).where(torch.rand(N) > share_without_target, -1)
    targets[0] = 1
    loss = cross_entropy(logits, targets, max_float32_logits)
    expected = F.cross_entropy(logits.float(), targets, ignore_index=-1)
    close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(0.25))
    (expected_gradient,) = torch.autograd.grad(expected, logits, torch.tensor(0.25))
    assert gradient.dtype == dtype
    rtol = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}[dtype]
    close(gradient, expected_gradient, rtol=rtol, atol=1e-6)


class LargestFloat32(TorchDispatchMode):
    """Notes the number of elements of the largest float32 tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_many_logits_never_has_all_of_them_in_float32(dtype):
    N, V, max_float32_logits = 64, 1000, 4000
    logits = torch.randn(N, V).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,))
    with LargestFloat32() as largest:
        cross_entropy(logits, targets, max_float32_logits).backward()
    assert largest.elements == max_float32_logits
    with LargestFloat32() as largest_of_torch:
        cross_entropy(logits, targets, N * V).backward()
    assert largest_of_torch.elements == N * V


def test_gradients_of_many_logits_do_not_underflow_in_fp16():
    N, V, loss_scale = 8192, 16, 2.0**16
    torch.manual_seed(0)
    logits = torch.randn(N, V).half().requires_grad_()
    targets = torch.randint(V, (N,))
    (loss_scale * cross_entropy(logits, targets, max_float32_logits=1000)).backward()
    exact_logits = logits.detach().double().requires_grad_()
    (loss_scale * F.cross_entropy(exact_logits, targets)).backward()
    close(logits.grad.double(), exact_logits.grad, rtol=2**-9, atol=0)


def test_the_loss_reads_the_first_columns_of_wider_logits():
    torch.manual_seed(0)
    wide = torch.randn(2, 15, 64, requires_grad=True)
    targets = torch.randint(50, (30,))
    logits = wide[..., :50].flatten(0, 1)
    loss = cross_entropy(logits, targets, max_float32_logits=100)
    expected = F.cross_entropy(logits, targets)
    close(loss, expected)
    close(torch.autograd.grad(loss, wide), torch.autograd.grad(expected, wide))


def test_a_second_backward_pass_through_the_loss_is_refused():
    logits = torch.randn(4, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(4, dtype=torch.long), max_float32_logits=0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_a_probability_that_underflows_costs_87_nats_and_has_a_finite_gradient():
    logits = torch.tensor([[0.0, 1e4], [0.0, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, -1]), max_float32_logits=0)
    loss.backward()
    assert loss.item() == pytest.approx(87, abs=1)
    assert logits.grad.tolist() == [[-1, 1], [0, 0]]
