"""Peak FLOP/s of chips, by their `device_kind` in JAX."""

# Dense matrix products of one JAX device: (bfloat16, float32). By default a TPU multiplies float32 in bfloat16, a GPU
# since Ampere in TF32. Sources: cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e} (on v2 and v3 a device is half a chip)
# and NVIDIA's data sheets of V100, A100, H100, H200, L4 (without sparsity).
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
