"""The most that a device can compute, to say which share of it a run makes use of."""

import math

import jax

from adaptive_span_jax import flops
from adaptive_span_jax.config import Config

# Dense matrix products in FLOP/s of one JAX device, by `device_kind`: (bfloat16, float32). A TPU multiplies float32 in
# bfloat16 unless told otherwise, a GPU since Ampere in TF32. Sources: cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e}
# (of v2 and v3, half a chip is a device) and NVIDIA's data sheets of V100, A100, H100, H200, L4 (without sparsity).
PEAK = {
    "TPU v2": (22.5e12, 22.5e12),
    "TPU v3": (61.5e12, 61.5e12),
    "TPU v4": (275e12, 275e12),
    "TPU v5 lite": (197e12, 197e12),
    "TPU v5e": (197e12, 197e12),
    "TPU v5": (459e12, 459e12),
    "TPU v5p": (459e12, 459e12),
    "TPU v6 lite": (918e12, 918e12),
    "TPU v6e": (918e12, 918e12),
    "Tesla V100-SXM2-16GB": (125e12, 15.7e12),
    "Tesla V100-SXM2-32GB": (125e12, 15.7e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12),
    "NVIDIA H100 80GB HBM3": (989e12, 495e12),
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA H200": (989e12, 495e12),
    "NVIDIA L4": (121e12, 60e12),
}


def utilisation(config: Config, average_span: float, tokens_per_second: float, devices: list[jax.Device]) -> float:
    """The share of the devices' peak that training uses; not a number where the peak is not known.

    Only what the model needs counts, by the paper's formula: two operations per multiply-add, and a backward pass of
    twice the forward pass. What is computed besides (position scores, masked-out corners, layers computed again, the
    output layer) does not.
    """
    peaks = PEAK.get(devices[0].device_kind)
    if peaks is None or config.model.compute_dtype == "float64":
        return math.nan
    peak = peaks[0 if config.model.compute_dtype == "bfloat16" else 1] * len(devices)
    return 6 * flops.paper_flops(config, average_span) * tokens_per_second / peak
