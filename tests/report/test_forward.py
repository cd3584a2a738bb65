"""The model in the page against the model in torch, and why a head looked where it looked."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from models import configs, lively, random_tokens

from model import GPT
from report.page import PARTS

ASK = """([c, W, ids]) => {
  for (const of of Object.values(W)) of.data = Float64Array.from(of.data);
  const pass = forward(W, c, ids), terms = [];
  for (let l = 0; l < c.n_layer; l++) for (const [h, i, j] of [[0, 5, 2], [3, 9, 9]]) {
    terms.push([l, h, i, j, why(W, c, pass, l, h, i, j).map(({ value }) => value)]);
  }
  return { terms, logits: [...pass.logits], weights: pass.layers.map(({ weights }) => [...weights]),
    wrote: pass.parts.map(({ wrote }) => [...wrote]) };
}"""


@pytest.fixture(scope="module")
def tab(chromium):
    tab = chromium.new_page()
    for name in ("forward.js", "why.js"):
        tab.add_script_tag(content=(PARTS / name).read_text(encoding="utf-8"))
    return tab


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs)
def test_the_page_computes_what_the_model_computes(tab, config):
    model, ids = lively(GPT(config)).double(), random_tokens(12)
    W = {name: {"shape": list(p.shape), "data": p.flatten().tolist()}
         for name, p in model.named_parameters()}
    found = tab.evaluate(ASK, [vars(config), W, ids.tolist()])
    with torch.no_grad():
        logits, scores = model(ids[None])[0][0].numpy(), []
        hidden = model.hidden(ids[None])[0].numpy()
        maps = model.attention_maps(ids[None])[:, 0].numpy()
        x = model.embed(ids[None])
        for block in model.blocks:
            rotary = None if model.rotary is None else model.rotary[:, :12].double()
            q, k, _ = block.attention.project(block.norm_1(x), rotary)
            scores.append(q @ k.repeat_interleave(4 // k.shape[1], 1).mT / config.key_dim ** 0.5)
            x = block(x, rotary)
    # Where torch norms queries and keys and turns them, it does so in float32.
    assert np.array(found["logits"]).reshape(12, -1) == pytest.approx(logits, abs=2e-4, rel=1e-4)
    assert np.array(found["weights"]).reshape(maps.shape) == pytest.approx(maps, abs=1e-5)
    assert np.sum(found["wrote"], axis=0).reshape(12, -1) == pytest.approx(hidden, abs=1e-4)
    for layer, head, i, j, terms in found["terms"]:
        row = scores[layer][0, head, i, :i + 1]
        expected = (row[j] - row.mean()).item()
        assert sum(terms) == pytest.approx(expected, abs=1e-5 * (1 + np.abs(terms).sum()))
