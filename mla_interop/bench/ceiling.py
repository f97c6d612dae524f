"""What this device can do at best: a large matrix product, timed in the run whose attention is compared with it."""

from typing import Any

from mla_interop.bench.timing import per_call

# Large enough that the product is bound by arithmetic, small enough to take milliseconds.
SIZES = {"cuda": 8192, "cpu": 1024}


def matrix_product(device: str, dtype: str, size: int | None = None) -> dict[str, Any]:
    """A square matrix product by torch.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        dtype: Name of the operands' dtype.
        size: Rows and columns; None: the device's of ``SIZES``.

    Returns:
        ``{"dtype", "size", "us", "us_min", "us_max", "tflops"}``: microseconds a product, and 2 * size^3 operations over the median.
    """
    import torch

    from mla_interop.bench.torch_contenders import looped

    size = SIZES[device] if size is None else size
    where, kind = torch.device(device), getattr(torch, dtype)
    a, b = (torch.randn(size, size, device=where).to(kind) for _ in range(2))
    made = torch.empty(size, size, device=where, dtype=kind)
    found = per_call(looped(lambda: torch.mm(a, b, out=made), where))
    return {"dtype": dtype, "size": size, **found, "tflops": 2e-6 * size**3 / found["us"]}
