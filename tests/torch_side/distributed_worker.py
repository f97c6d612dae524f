"""What one of several processes does in tests over ``torch.distributed``: ``python distributed_worker.py RANK WORLD FILE DEVICE TEST``."""

import sys
from typing import Any

import numpy as np
import oracle
import torch
import torch.distributed as dist

import torch_side
from mla_interop import MLAInputError

LENGTHS_Q, LENGTHS_K, HEADS = (5, 0, 17, 3, 6, 9), (9, 4, 17, 0, 2, 40), 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def problem(device: str, dtype: torch.dtype, tail: int = 0) -> tuple[Any, ...]:
    """q, k, v of the whole batch, the same on every rank, and its offsets."""
    make = torch.Generator().manual_seed(3)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (LENGTHS_Q, LENGTHS_K))
    sizes = (cu_q[-1] + tail, 192), (cu_k[-1] + tail, 192), (cu_k[-1] + tail, 128)
    q, k, v = (torch.randn(rows, HEADS, width, generator=make).to(device, dtype) for rows, width in sizes)
    return q, k, v, cu_q, cu_k


def judge(out: Any, lse: Any, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, is_causal: bool) -> None:
    """Against the oracle, over all heads given; rows without a key exactly."""
    expected, expected_lse = oracle.attention(*(x.double().cpu().numpy() for x in (q, k, v)), cu_q, cu_k, is_causal=is_causal)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    made, made_lse = out.double().cpu().numpy(), lse.double().cpu().numpy()
    error = np.linalg.norm(made - expected) / np.linalg.norm(expected)
    empty = np.isneginf(expected_lse)
    assert error <= TOLERANCE[q.dtype], error
    assert np.array_equal(np.isneginf(made_lse), empty) and not made[empty.T].any()
    np.testing.assert_allclose(made_lse[~empty], expected_lse[~empty], atol=1e-3)


def context_parallel(rank: int, world: int, device: str) -> None:
    """Even and uneven shards, both masks, a tail, lengths on the host, on the device and prepared; every rank has the same bits."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for is_causal in (True, False):
        for tail in (0, 4):
            q, k, v, cu_q, cu_k = problem(device, dtype, tail)
            rows = k.shape[0]
            for cuts in (
                np.linspace(0, rows, world + 1).astype(int),
                np.array([0, *[13 + 2 * i for i in range(world - 1)], rows]),
                np.array([0] * world + [rows]),
            ):
                first, last = int(cuts[rank]), int(cuts[rank + 1])
                mine = q, k[first:last], v[first:last]
                options: dict[str, Any] = {"is_causal": is_causal, "return_lse": True}
                chosen = torch_side.context_parallel_mla_prefill(*mine, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, first_row=first, **options)
                judge(*chosen, q, k, v, cu_q, cu_k, is_causal)
                # Lengths that the device alone knows may be another kernel's, with other bits: one that takes both is named.
                options["backend"] = "CPU_SDPA" if device == "cpu" else "FLASH_ATTN"
                made = torch_side.context_parallel_mla_prefill(*mine, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, first_row=first, **options)
                judge(*made, q, k, v, cu_q, cu_k, is_causal)
                bits = [torch.empty_like(made[0]) for _ in range(world)]
                dist.all_gather(bits, made[0])
                assert all(torch.equal(bits[0], other) for other in bits)
                on_device = [torch.tensor(x, device=device) for x in (cu_q, cu_k)]
                metadata = torch_side.prepare_context_parallel_metadata(
                    *on_device, rows=last - first, first_row=first, is_causal=is_causal, num_tokens_q=len(q), device=device
                )
                for _ in range(2):
                    again = torch_side.context_parallel_mla_prefill(*mine, metadata=metadata, **options)
                    assert all(torch.equal(a, b) for a, b in zip(again, made, strict=True))
    q, k, v, cu_q, _ = problem(device, dtype)
    part = q.shape[0] // world
    alone = torch_side.context_parallel_mla_prefill(
        q[: part * world], *(x[: part * world][rank * part :][:part] for x in (k, v)), cu_seqlens_q=[0, part * world]
    )
    assert alone.shape == (part * world, HEADS, 128)
    for rows, ends in ((0, [0, 0]), (0, [0]), (5, [0])):  # no queries, no sequences, padding alone
        out, lse = torch_side.context_parallel_mla_prefill(q[:rows], k[:3], v[:3], cu_seqlens_q=ends, return_lse=True)
        assert out.shape == (rows, HEADS, 128) and not out.any() and lse.shape == (HEADS, rows) and bool(lse.isneginf().all())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"padding": "some"}, "padding: got 'some'"),
        ({"first_row": 1.5}, "first_row: got float"),
        ({"first_row": torch.tensor(0)}, "first_row: got Tensor"),
        ({"is_causal": 1}, "is_causal: got 1"),
        ({"v": None}, "v: got NoneType; allowed: a torch.Tensor"),
    ]
    for options, words in wrong:
        try:
            torch_side.context_parallel_mla_prefill(**{"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, **options})
        except MLAInputError as refusal:
            assert words in str(refusal)  # noqa: PT017
        else:
            raise AssertionError(words)


def sharded_heads(rank: int, world: int, device: str) -> None:
    """DTensors over heads, and over batch and heads, give DTensors without any collective; every other placement is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh(device, (world,))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, cu_q, cu_k = problem(device, dtype)
    split = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    metadata = torch_side.prepare_metadata(cu_q, cu_k, device=device)
    with CommDebugMode() as communication:
        out, lse = torch_side.mla_prefill(*split, metadata=metadata, return_lse=True)
        alone = torch_side.mla_prefill(*split, metadata=metadata)
    assert communication.get_total_counts() == 0
    assert isinstance(out, DTensor) and out.placements == (Shard(1),) and lse.placements == (Shard(0),)
    assert out.to_local().shape[1] == HEADS // world and out.shape == (*q.shape[:2], 128) and lse.shape == (HEADS, len(q))
    judge(out.full_tensor(), lse.full_tensor(), q, k, v, cu_q, cu_k, True)
    assert torch.equal(alone.to_local(), out.to_local())
    odd = [distribute_tensor(x[:, :3].contiguous(), mesh, [Shard(1)]) for x in (q, k, v)]
    judge(*(x.full_tensor() for x in torch_side.mla_prefill(*odd, metadata=metadata, return_lse=True)), *(x[:, :3] for x in (q, k, v)), cu_q, cu_k, True)
    dense = [torch.stack([x[:6], x[6:12]]) for x in (q, k, v)]
    for dim, lse_dim in ((0, 0), (2, 1)):
        made, made_lse = torch_side.mla_prefill(*(distribute_tensor(x, mesh, [Shard(dim)]) for x in dense), return_lse=True)
        assert made.placements == (Shard(dim),) and made_lse.placements == (Shard(lse_dim),)
        expected = torch_side.mla_prefill(*dense, return_lse=True)
        torch.testing.assert_close((made.full_tensor(), made_lse.full_tensor()), expected)
    compiled = torch.compile(lambda q, k, v, metadata: torch_side.mla_prefill(q, k, v, metadata=metadata), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*split, metadata).to_local(), alone.to_local())
    whole = [DTensor.from_local(x, mesh, [Replicate()]) for x in (q, k, v)]
    assert torch_side.mla_prefill(*whole, metadata=metadata).placements == (Replicate(),)
    wrong = [
        ([distribute_tensor(q, mesh, [Shard(0)]), *split[1:]], "q: got placements .*Shard.dim=0.*allowed: Replicate, or Shard.1.: heads"),
        ([split[0], whole[1], split[2]], "q, k, v: got placements .*allowed: the same for all three"),
        ([split[0], k, split[2]], "k: got a plain tensor beside DTensors"),
        ([DTensor.from_local(q, mesh, [Partial()]), *whole[1:]], "q: got placements .*Partial"),
    ]
    for inputs, words in wrong:
        try:
            torch_side.mla_prefill(*inputs, metadata=metadata)
        except MLAInputError as error:
            import re

            assert re.search(words, str(error)), str(error)
        else:
            raise AssertionError(words)


def as_strict_as_nccl() -> None:
    """NCCL takes contiguous tensors only; gloo takes others too, and would hide on a CPU what fails on GPUs."""

    def strict(collective: Any) -> Any:
        def checked(*arguments: Any, **named: Any) -> Any:
            assert all(x.is_contiguous() for x in arguments if isinstance(x, torch.Tensor)), collective
            return collective(*arguments, **named)

        return checked

    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single"):
        if hasattr(dist, name):
            setattr(dist, name, strict(getattr(dist, name)))


def main() -> None:
    rank, world, file, device, test = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", init_method=f"file://{file}", rank=rank, world_size=world)
    as_strict_as_nccl()
    try:
        globals()[test](rank, world, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
