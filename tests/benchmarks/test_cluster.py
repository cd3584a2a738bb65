"""The simulation of a cluster: published speeds, limiting cases, and its counted constants."""

from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import cluster
from benchmarks.cluster import (
    BANDWIDTH_SHARE,
    GPUS,
    MOVED_BYTES,
    MOVED_LOGIT_BYTES,
    NETWORKS,
    PUBLISHED_MODELS,
    Cluster,
    check_predictions,
    make_config,
    plan_work,
    predict_published,
    read_published,
    simulate_step,
)
from config import GPTConfig
from kernels import autocast
from training.flops import model_size
from variants import build_model

H100 = GPUS["H100"]
SMALL = GPTConfig(1000, block_size=1024, n_layer=4, n_head=4, n_embd=256)
# Parameters as the published tables and Grattafiori et al. 2024 state them.
PARAMETERS = {
    "Llama 3 70B": 70.6e9,
    "Llama 3 8B": 8.03e9,
    "MPT 13B": 12_853_954_560,
    "MPT 7B": 6_658_859_008,
    "MPT 3B": 2_651_837_440,
    "MPT 1B": 1_315_950_592,
    "MPT 760M": 760_470_528,
    "MPT 350M": 355_985_408,
    "MPT 125M": 125_311_488,
}
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
VIEWS = ("view", "_unsafe_view", "t", "transpose", "expand", "split", "slice", "detach", "select")


def make_cluster(processes: int, has_latency: bool = True) -> Cluster:
    return Cluster(H100, NETWORKS["NDR"], processes, 0.5, has_latency)


@pytest.mark.slow
def test_published_speeds_are_predicted_within_15_percent():
    predictions = predict_published()
    check_predictions(predictions)
    assert len({p.row[:2] for p in predictions}) == sum(p.is_fitted for p in predictions) == 5
    assert all(abs(p.error) < 1e-4 for p in predictions if p.is_fitted)
    wrong = predictions[1]._replace(speed=1.2 * predictions[1].row.speed)
    with pytest.raises(AssertionError, match=r"20\.0% off"):
        check_predictions([wrong])


def test_the_published_models_have_the_published_sizes():
    assert {row.model for row in read_published()} == set(PUBLISHED_MODELS) == set(PARAMETERS)
    for name, parameters in PARAMETERS.items():
        assert model_size(PUBLISHED_MODELS[name])[0] == pytest.approx(parameters, rel=1e-3)


def test_a_group_within_a_machine_uses_nvlink_and_a_ring_across_machines_all_network_cards():
    size = 1e9
    for ranks, stride, bandwidth in (
        (8, 1, H100.nvlink),
        (64, 1, 8 * NETWORKS["NDR"]),
        (8, 8, NETWORKS["NDR"]),  # replicas of models that are sharded within machines
        (4, 2, H100.nvlink),
        (16, 4, 2 * NETWORKS["NDR"]),
    ):
        group = make_cluster(ranks * stride, has_latency=False).group(ranks, stride)
        expected = size * (ranks - 1) / ranks / (BANDWIDTH_SHARE * bandwidth)
        assert group.scatter_seconds(size) == pytest.approx(expected)
        assert group.all_reduce_seconds(size) == pytest.approx(2 * expected)


def test_the_latency_of_a_ring_grows_with_its_ranks_and_that_of_a_tree_with_their_logarithm():
    small, large = (make_cluster(ranks).group(ranks) for ranks in (64, 1024))
    assert large.scatter_seconds(1) / small.scatter_seconds(1) == pytest.approx(16, rel=0.1)
    assert large.all_reduce_seconds(1) < 2 * small.all_reduce_seconds(1)


@pytest.mark.parametrize("shard", [8, 64])
def test_communication_is_hidden_up_to_its_ends_or_limits_the_step(shard):
    config = make_config(SMALL, 64, shard, 8)
    work = plan_work(config, make_cluster(64))
    first = work.gather_outside + work.gather_block
    last = work.reduce_block + max(work.average_block, work.reduce_outside)
    ends = first + last + work.average_outside

    slow_gpu = H100._replace(flops=1e9)
    hidden = simulate_step(config, make_cluster(64)._replace(gpu=slow_gpu)).exposed
    assert hidden == pytest.approx(ends, rel=1e-3)

    slow_network = make_cluster(64)._replace(network=1e3, gpu=H100._replace(nvlink=1e3))
    work = plan_work(config, slow_network)
    link = 4 * (2 * work.gather_block + work.reduce_block)
    link += work.gather_outside + work.reduce_outside
    replicas = 4 * work.average_block + work.average_outside
    exposed = simulate_step(config, slow_network).exposed
    assert max(link, replicas) - work.compute <= exposed <= link + replicas


def test_one_gpu_communicates_nothing_and_complete_models_once_per_step():
    assert simulate_step(make_config(SMALL, 1, 1, 8), make_cluster(1)).exposed == 0

    once, four_times = {}, {}
    for size in ((8, 1), (8, 8), (64, 8)):
        once[size], four_times[size] = (
            simulate_step(make_config(SMALL, *size, 8, accumulate), make_cluster(size[0]))
            for accumulate in (1, 4)
        )
        assert four_times[size].compute == pytest.approx(4 * once[size].compute)
        assert once[size].exposed > 0
    assert four_times[8, 1].exposed == once[8, 1].exposed
    for size in ((8, 8), (64, 8)):
        assert four_times[size].exposed == pytest.approx(4 * once[size].exposed)


def test_recomputed_activations_repeat_the_forward_pass_of_the_blocks():
    config = make_config(SMALL, 1, 1, 8)
    work = plan_work(config, make_cluster(1))
    again = plan_work(replace(config, checkpoint_activations=True), make_cluster(1))
    assert again.block_backward == pytest.approx(1.5 * work.block_backward)
    assert again.block_forward == work.block_forward and again.head == work.head


def test_the_tables_of_the_page_are_current():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for part in cluster.PARTS:
        table = cluster.make_table(part, cluster.ClusterOptions())
        assert f"<!-- {part} -->\n{table}\n<!-- end -->" in page, (
            "run python -m benchmarks.docs only=scaling"
        )


class ByteCounter(TorchDispatchMode):
    """Count the bytes of the tensors that operations read and write, without matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket.__name__ not in (*MATRIX_PRODUCTS, *VIEWS):
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def count_moved_bytes(n_layer: int, vocab_size: int) -> float:
    """Return the bytes that a step in bf16 moves, per token, eager, with negligible attention."""
    model = build_model(GPTConfig(vocab_size, block_size=8, n_layer=n_layer, n_head=1, n_embd=64))
    tokens = torch.randint(vocab_size, (512, 8))
    with ByteCounter() as counter:
        with autocast("cpu", "bf16"):
            _, loss = model(tokens, tokens)
        loss.backward()
    return counter.bytes / tokens.numel()


def test_eager_code_moves_as_many_bytes_as_the_simulation_assumes():
    one = count_moved_bytes(1, 64)
    channel_bytes = (count_moved_bytes(2, 64) - one) / 64
    logit_bytes = (count_moved_bytes(1, 192) - one) / 128
    assert channel_bytes == pytest.approx(MOVED_BYTES["gelu", False], rel=0.15)
    assert logit_bytes == pytest.approx(MOVED_LOGIT_BYTES[False], rel=0.15)
