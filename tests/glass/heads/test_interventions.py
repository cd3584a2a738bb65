"""Interventions as taps and masks, against changes made by hand."""

import torch
from hypothesis import given
from models import configs, few, lively, random_tokens

from glass.heads.interventions import Interventions, chain_taps
from glass.heads.results import Head
from variants import build_model


@few
@given(configs)
def test_no_head_attends_to_a_hidden_token_and_ablated_heads_write_nothing(config):
    model, tokens = lively(build_model(config)), random_tokens(1, 8)
    interventions = Interventions((Head(0, 1), Head(1, 3)), (2, 5))
    weights, heads = [], {}
    taps = {("weights", layer): weights.append for layer in range(2)}
    taps |= {
        ("heads", layer): lambda y, layer=layer: heads.update({layer: y.clone()})
        for layer in range(2)
    }
    taps = chain_taps(interventions.taps(), taps)
    with torch.no_grad():
        model.run_blocks(tokens, mask=interventions.mask(8, tokens.device), taps=taps)
    for A in weights:
        for hidden in (2, 5):
            assert A[0, :, hidden + 1 :, hidden].abs().max() == 0
            assert A[0, :, hidden, hidden].min() > 0
    assert heads[0][0, :, 1].abs().max() == heads[1][0, :, 3].abs().max() == 0
    assert heads[0][0, :, 0].abs().max() > 0


def test_the_mask_of_the_last_queries_is_a_part_of_the_whole():
    interventions = Interventions(hidden=(0, 4))
    whole = interventions.mask(7, torch.device("cpu"))
    assert torch.equal(interventions.mask(7, torch.device("cpu"), 3), whole[3:])
    assert Interventions().mask(7, torch.device("cpu")) is None
