"""The paper's numbers, and that the executed multiply-adds are those we count."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import flops, transformer
from tests.conftest import tiny_config
from tests.model.test_attention import far_tiles_of
from tests.test_config import load

VOCABULARY = 7


def test_small_model_costs_42_million():
    assert round(flops.paper_flops(load("text8"), 314) / 1e6) == 42


def test_models_that_recompute_512_positions_cost_22_and_120_billion():
    def recomputing(layers: int) -> float:
        small = load("text8")
        deep = dataclasses.replace(small, model=dataclasses.replace(small.model, layers=layers))
        return 512 * flops.paper_flops(deep, 512) / 1e9

    assert math.floor(recomputing(12)) == 22  # 22.5, which the paper rounds down
    assert round(recomputing(64)) == 120


def test_large_model_costs_217_million_and_the_published_179_only_with_a_narrower_network():
    large = load("text8_large")
    narrow = dataclasses.replace(large, model=dataclasses.replace(large.model, feedforward=3072))
    assert round(flops.paper_flops(large, 245) / 1e6) == 217
    assert round(flops.paper_flops(narrow, 245) / 1e6) == 179


def test_shares_and_saving():
    small = load("text8")
    per_layer = {span: flops.paper_flops(small, span) / small.model.layers for span in (256, 314, 8192)}
    feedforward = 2 * small.model.width * small.model.feedforward
    assert round(100 * feedforward / per_layer[256]) == 62
    assert round(100 * (1 - feedforward / per_layer[8192])) == 82
    assert round(100 * (1 - per_layer[314] / per_layer[8192])) == 70


def test_persistent_vectors_cost_what_as_many_positions_cost():
    config = load("enwik8_persistent_small")
    assert flops.paper_flops(config, 314) == 18 * (4 * 512**2 + 2 * 512 * (1024 + 314))
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, feedforward=4096))
    assert flops.paper_flops(wider, 314) == flops.paper_flops(config, 314)


def with_spans(config: Config, z_LH: np.ndarray) -> transformer.Params:
    params = transformer.init(config, VOCABULARY, jax.random.key(0))
    params[transformer.LAYERS]["attention"]["span"]["span_fraction_H"] = jnp.asarray(
        z_LH / config.span.limit, jnp.float32
    )
    return params


def executed_products(config: Config, z_LH: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> float:
    """Multiply-adds per token of all matrix products of a forward pass, counted one by one while it runs."""
    primitive, total = jax.lax.dot_general_p, 0
    bind = primitive.bind

    def counting(left, right, **options):
        nonlocal total
        (contracted, _), _ = options["dimension_numbers"]
        product = bind(left, right, **options)
        if not isinstance(left, jax.core.Tracer):  # running, and not being compiled in order to run
            total += product.size * math.prod(left.shape[axis] for axis in contracted)
        return product

    tokens_BT = np.zeros((1, config.train.segment), np.int32)
    params, memory = with_spans(config, z_LH), transformer.init_memory(config, 1)
    monkeypatch.setattr(primitive, "bind", counting)
    with jax.disable_jit():  # loops whose bounds are values then run turn by turn
        transformer.apply(config, params, tokens_BT, memory)
    monkeypatch.undo()
    return total / tokens_BT.size - config.model.width * VOCABULARY


@pytest.mark.parametrize(
    ("platform", "segment", "limit", "z_LH", "persistent"),
    [
        ("cpu", 128, 300, [[0, 300], [40, 133]], 0),
        ("cpu", 70, 100, [[100, 20], [31, 60]], 0),  # padded to 128; memory shorter than a block
        ("cpu", 13, 37, [[3, 37], [0, 9]], 0),  # near only
        ("cpu", 13, 37, [[3, 37], [0, 9]], 11),
        ("tpu", 128, 300, [[0, 300], [40, 133]], 0),
        ("gpu", 320, 600, [[0, 600], [40, 133]], 0),
    ],
)
def test_executed_is_what_is_executed(platform, segment, limit, z_LH, persistent, monkeypatch):
    sizes = {"layers": 2, "width": 6, "feedforward": 5, "persistent": persistent}
    config = tiny_config(model=sizes, span={"limit": limit}, train={"segment": segment})
    z_LH = np.array(z_LH, np.float32)
    with far_tiles_of(platform):
        found = flops.cost(config, jnp.asarray(z_LH), "per_head").executed
        assert_allclose(found, executed_products(config, z_LH, monkeypatch), rtol=1e-6)


@pytest.mark.parametrize("persistent", [0, 11])
def test_published_is_plain_attention_where_spans_are_full(persistent, monkeypatch):
    config = tiny_config(
        model={"attention": "plain", "persistent": persistent}, span={"limit": 64}, train={"segment": 16}
    )
    z_LH = np.full((3, 2), 64.0)
    found = flops.published_flops(config, jnp.asarray(z_LH, jnp.float32))
    assert_allclose(found, executed_products(config, z_LH, monkeypatch), rtol=1e-6)


def test_published_pays_the_longest_head_of_each_layer():
    config = tiny_config(span={"limit": 1000, "ramp": 32})
    short, one_long = jnp.zeros((3, 2)), jnp.zeros((3, 2)).at[1, 0].set(200)
    difference = flops.published_flops(config, one_long) - flops.published_flops(config, short)
    width, length = config.model.width, config.train.segment
    extra = 256 - 64  # both rounded up to multiples of 64
    assert_allclose(difference, 2 * width**2 * extra / length + 3 * width * extra, rtol=1e-6)


def test_xla_counts_the_same():
    """XLA counts two for each multiply-add, and the small rest besides: softmax, mask, norms, residual sums."""
    config = tiny_config(
        model={"attention": "plain", "layers": 1, "width": 512, "heads": 2, "feedforward": 1024},
        span={"limit": 64, "ramp": 32},
        train={"segment": 32},
    )
    z_LH = np.full((1, 2), 64.0)
    params, memory = with_spans(config, z_LH), transformer.init_memory(config, 1)
    tokens_BT = np.zeros((1, 32), np.int32)

    compiled = jax.jit(lambda params, memory: transformer.apply(config, params, tokens_BT, memory)).lower(
        params, memory
    )
    analysis = compiled.compile().cost_analysis()
    assert analysis
    counted = analysis["flops"] / 2 / tokens_BT.size
    expected = float(flops.published_flops(config, jnp.asarray(z_LH, jnp.float32))) + config.model.width * VOCABULARY
    assert expected < counted < 1.02 * expected


def inner_jaxprs(equation) -> list:
    values = [each for value in equation.params.values() for each in (value if isinstance(value, tuple) else (value,))]
    return [getattr(value, "jaxpr", value) for value in values if hasattr(getattr(value, "jaxpr", value), "eqns")]


def equations(jaxpr, name: str, *skipped: str) -> list:
    """The equations of one primitive at any depth, except inside of those skipped."""
    found = []
    for equation in jaxpr.eqns:
        found += [equation] if equation.primitive.name == name else []
        if equation.primitive.name not in skipped:
            found += [each for inner in inner_jaxprs(equation) for each in equations(inner, name, *skipped)]
    return found


def products(jaxpr) -> int:
    """Multiply-adds of all matrix products, except in loops with dynamic bounds and in kernels."""
    total = 0
    for equation in equations(jaxpr, "dot_general", "while", "pallas_call"):
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval
        total += equation.outvars[0].aval.size * math.prod(left.shape[axis] for axis in contracted)
    return total


@pytest.mark.parametrize("z", [0.0, 40.0, 100.0, 500.0])
def test_fused_is_what_the_kernel_computes(z):
    # One layer, one stream; K = 128, so that no lane only pads.
    sizes = {"layers": 1, "width": 256, "heads": 2, "feedforward": 5, "attention": "fused"}
    config = tiny_config(model=sizes, span={"limit": 512, "ramp": 32}, train={"segment": 256})
    params = jax.eval_shape(lambda: transformer.init(config, VOCABULARY, jax.random.key(0)))
    memory = jax.eval_shape(lambda: transformer.init_memory(config, 1))
    tokens_BT = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    forward = jax.make_jaxpr(functools.partial(transformer.apply, config))(params, tokens_BT, memory).jaxpr
    [scan] = equations(forward, "scan")
    [layer] = inner_jaxprs(scan)
    [kernel] = equations(layer, "pallas_call")
    branches = [inner for cond in equations(kernel.params["jaxpr"], "cond", "cond") for inner in inner_jaxprs(cond)]
    short, long = sorted((branch for branch in branches if products(branch)), key=products)
    full, masked = (products(each.params["body_jaxpr"].jaxpr) for each in equations(long, "while"))
    assert full == masked
    steps = -(-min(int(z) + 33, 512) // 128)
    head = products(short) if z + 33 <= 64 else products(long) + (steps - 1) * full
    expected = (products(layer) + 2 * head) / 256
    assert_allclose(flops.fused_flops(config, jnp.full((1, 2), z)), expected, rtol=1e-6)
