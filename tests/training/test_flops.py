"""The counted operations are those that torch counts."""

import torch
from hypothesis import given
from models import configs, few
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from training.flops import model_size
from variants import build_model


@few
@given(configs)
def test_the_counted_operations_are_those_of_a_forward_and_backward_pass(config):
    tokens = torch.zeros(2, config.block_size, dtype=torch.int64)
    config.attention_sink = False  # its key does not count
    model = build_model(config)
    # FlopCounterMode does not count the fused attention of a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens)[1].backward()
    assert model_size(config)[1] * tokens.numel() == counter.get_total_flops()
