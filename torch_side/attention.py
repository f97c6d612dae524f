"""One layer's attention from latents: ``mla_attention`` on torch tensors, and ``MLAAttention`` as a module."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mla_interop import context, latents, lse
from mla_interop.backends.registry import parse_names
from mla_interop.context import ContextMetadata
from mla_interop.dimensions import MLADimensions, dimensions_from_config, softmax_scale
from mla_interop.errors import input_error
from mla_interop.latent_cache import host_scale, rows_to_store
from mla_interop.prefill import make_options, number_of_scale
from mla_interop.sequences import PrefillMetadata
from mla_interop.walk import Ops, scan, walk
from mla_interop.walk_check import check
from mla_interop.workspace import Workspace, workspace_shapes
from torch_side.functional import mla_prefill
from torch_side.launch import on_device
from torch_side.projection import check_grad, check_layout, project_function, project_weight, weight_of


def mla_attention(
    q: torch.Tensor,
    kv_c: torch.Tensor | None,
    k_pe: torch.Tensor | None,
    kv_b: Any,
    *,
    metadata: ContextMetadata,
    cache: torch.Tensor | None = None,
    cache_scale: Any = None,
    dimensions: MLADimensions | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Any = None,
    fallback: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Prefill attention of one layer: causal over the new tokens, and over the context that the paged cache holds.

    Args:
        q: ``[T, N, P + R]``, the rotary part behind.
        kv_c: ``[T, L]``, the new tokens' latents after their norm. None: the context alone, a partial result to be merged by LSE.
        k_pe: ``[T, R]``, their rotary keys; None where R is 0.
        kv_b: The up-projection: an ``nn.Linear`` from L to ``N * (P + V)`` features, a tensor ``[L, N * (P + V)]``, or any function of
            ``[S, L]`` (a quantized layer). Per head, k comes before v.
        metadata: What :func:`prepare_context_metadata` returned.
        cache: ``[blocks, block, L + R]`` of a dtype that converts to q's, or float8_e4m3fn; any strides but in its last dimension.
        cache_scale: What an FP8 cache's values are multiplied with: a number, or a tensor of one element.
        dimensions: P, R, V; needed where ``kv_b`` is a function.
        scale: Multiplied with the raw scores; None: ``(P + R) ** -0.5``. YaRN's factor is yours (``mla_interop.softmax_scale``).
        return_lse: Also return the LSE over context and new tokens.
        backend, fallback: As in ``mla_prefill``.
        workspace: uint8 of ``mla_interop.workspace_bytes(...)`` or more; its contents are undefined afterwards. None: it is allocated.
        out: Where to write the output.

    Returns:
        ``out [T, N, V]`` in q's dtype; with ``return_lse`` also float32 ``lse [N, T]``.

    Raises:
        MLAInputError: An argument is wrong.
        MLAUnsupportedError: No backend, or not the one asked for, can serve it.
    """
    _check_tensors(q, kv_c=kv_c, k_pe=k_pe, cache=cache)
    for name, x in (("q", q), ("kv_c", kv_c), ("k_pe", k_pe), ("cache", cache), ("kv_b", kv_b)):
        check_layout(name, x)
    weight = weight_of(kv_b, q.shape[1])
    check_grad(q=q, kv_c=kv_c, k_pe=k_pe, cache=cache, kv_b=getattr(kv_b, "weight", kv_b))
    make_options(scale, True, return_lse, backend, fallback, "finite")  # each call of a kernel does it too, but after products were launched
    cache_scale = host_scale(cache_scale)
    product = (None, None) if weight is None else ((weight.shape[1], weight.shape[0] * weight.shape[2]), weight.dtype)
    dimensions, rank = check(q, kv_c, k_pe, *product, cache, cache_scale, metadata, dimensions)
    _check_devices(q, kv_c=kv_c, k_pe=k_pe, cache=cache, kv_b=weight, cache_scale=cache_scale)
    if q.is_cuda and metadata.bounds.num_chunks:  # the new tokens come first: when the gather refused it, they would have been attended
        from mla_interop.kernels import triton_latents

        triton_latents.check_cache(cache)
    metadata = _with_rows_on(metadata, q.device)
    with_lse = return_lse or metadata.bounds.num_chunks > 0
    options = {"scale": scale, "backend": backend, "fallback": fallback}
    result = q.new_empty(*q.shape[:2], dimensions.v_head_dim) if out is None else out
    shapes = workspace_shapes(metadata, q.shape[0], dimensions, q.shape[1], rank, weight is None)
    buffers = _carve(workspace, shapes, q)
    project = project_function(kv_b, dimensions, buffers.kv) if weight is None else project_weight(weight, dimensions, buffers.kv)

    def attend(q: Any, k: Any, v: Any, lengths: PrefillMetadata, is_causal: bool) -> tuple[Any, Any]:
        target = result if is_causal else buffers.partial[: q.shape[0]]
        made = mla_prefill(q, k, v, metadata=lengths, is_causal=is_causal, return_lse=with_lse, out=target, **options)
        return made if with_lse else (made, None)

    ops = Ops(
        gather=lambda cache, rows, scale, dtype: latents.gather(cache, rows, scale=scale, out=buffers.latents[: rows.shape[0]]),
        project=project,
        attend=attend,
        merge=lambda out_a, lse_a, out_b, lse_b: lse.merge(out_a, lse_a, out_b, lse_b, out=out_a, lse=lse_a),
        widen=lambda part: buffers.carry[: part.shape[0]].copy_(part),
        fold=_fold,
        scan=scan,
    )
    with torch.no_grad():
        made, made_lse = walk(q, kv_c, k_pe, cache, metadata, ops, rank, dimensions.v_head_dim, cache_scale)
        if made.data_ptr() != result.data_ptr():  # a context alone that lies in one chunk
            result.copy_(made)
    return (result, made_lse) if return_lse else result


def prepare_context_metadata(
    query_lens: Any = None, context_lens: Any = None, block_table: Any = None, *, device: Any = None, **options: Any
) -> ContextMetadata:
    """``mla_interop.prepare_context_metadata``, with its arrays on ``device`` already: no layer copies anything to it.

    Args:
        query_lens, context_lens, block_table: As there.
        device: Where q and the cache are; None: the block table's device, if it is a tensor, else the CPU.
        **options: As there.

    Raises:
        MLAInputError, MLAUnsupportedError: As there.
    """
    if device is None:
        device = block_table.device if isinstance(block_table, torch.Tensor) else "cpu"
    where = torch.empty(0, device=device).device
    metadata = context.prepare_context_metadata(query_lens, context_lens, block_table, **options)
    for lengths in (metadata.new, *metadata.chunks):
        on_device(lengths, where)
    return replace(metadata, rows=torch.as_tensor(metadata.rows, device=where))


def write_latent_cache(cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor | None, slot_mapping: torch.Tensor, scale: Any = None) -> None:
    """Write new tokens' latents into a paged cache, in place, without a host sync.

    Args:
        cache: ``[blocks, block, L + R]``, of any strides.
        kv_c, k_pe: ``[T, L]``, ``[T, R]``; k_pe may be None where R is 0.
        slot_mapping: Integers ``[T]``, on the cache's device: ``block * block_size + offset`` of each token; a negative one writes nothing.
        scale: FP8 caches hold latents divided by it, clipped to their dtype's range.

    Raises:
        MLAInputError: The arguments do not fit each other.
    """
    for name, x in (("cache", cache), ("kv_c", kv_c), ("k_pe", k_pe), ("slot_mapping", slot_mapping)):
        if not isinstance(x, torch.Tensor) and not (name == "k_pe" and x is None):
            raise input_error(name, type(x).__name__, "a torch.Tensor")
        if x is not None and x.device != cache.device:
            raise input_error(name, f"device {x.device}", f"the cache's device, {cache.device}")
        check_layout(name, x)
    scale = host_scale(scale)
    rows = rows_to_store(cache, kv_c, k_pe, slot_mapping, scale)
    if not rows.shape[0]:
        return
    places = cache.shape[0] * cache.shape[1]
    # A GPU's are not read back, and in a program that is being traced there are none.
    known = slot_mapping.device.type == "cpu" and type(slot_mapping) is torch.Tensor and not torch.compiler.is_dynamo_compiling()
    if known and int(slot_mapping.max()) >= places:
        raise input_error("slot_mapping", f"slot {int(slot_mapping.max())}", f"slots of the cache, up to {places - 1}")
    # A token without a slot repeats the first token that has one, which writes the same twice; and if none has, what slot 0 holds already.
    present = slot_mapping >= 0
    stand_in = present.int().argmax(0, keepdim=True)  # of one dimension: an index of none would be read back
    slots = torch.where(present, slot_mapping, slot_mapping[stand_in]).long()
    some = slots >= 0
    slots = slots.clamp(min=0)
    place_in_cache = torch.div(slots, cache.shape[1], rounding_mode="floor"), slots % cache.shape[1]
    if rows.element_size() == 1:  # torch indexes no float8; as bytes it does
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    rows = torch.where(present[:, None], rows, rows[stand_in])
    cache[place_in_cache] = torch.where(some[:, None], rows, cache[0, 0])


class MLAAttention(torch.nn.Module):
    """The attention of one layer, from latents to heads, with its dimensions, scale and backend fixed at construction.

    Args:
        dimensions: P, R, V.
        kv_b_proj: As ``kv_b`` of :func:`mla_attention`; a module becomes a submodule. None: every call gives one.
        scale: Softmax scale; None: ``(P + R) ** -0.5``.
        backend: As in :func:`torch_side.mla_prefill`; an unknown name is refused here.

    Raises:
        MLAInputError: ``dimensions`` is something else, the scale is no number, or the backend's name is unknown.
    """

    def __init__(self, dimensions: MLADimensions, kv_b_proj: Any = None, *, scale: float | None = None, backend: Any = None) -> None:
        super().__init__()
        if not isinstance(dimensions, MLADimensions):
            raise input_error("dimensions", type(dimensions).__name__, "MLADimensions")
        self.dimensions = dimensions
        self.kv_b_proj = kv_b_proj
        self.scale = dimensions.qk_head_dim**-0.5 if scale is None else number_of_scale(scale)
        self.backend = None if backend is None else parse_names("backend", backend)

    @classmethod
    def from_config(cls, config: Any, kv_b_proj: Any = None, *, backend: Any = None) -> "MLAAttention":
        """With a model configuration's dimensions and scale, YaRN's factor included.

        Args:
            config: A ``transformers`` config, a mapping, or a path to a ``config.json``.
            kv_b_proj, backend: As above.

        Raises:
            MLAInputError: The configuration cannot be read, or has no MLA dimensions.
        """
        return cls(dimensions_from_config(config), kv_b_proj, scale=softmax_scale(config), backend=backend)

    def forward(
        self, q: torch.Tensor, kv_c: torch.Tensor | None, k_pe: torch.Tensor | None, *, metadata: ContextMetadata, kv_b_proj: Any = None, **options: Any
    ) -> Any:
        """Attention of new tokens over themselves and their context: q, kv_c, k_pe, metadata and ``options`` as in :func:`mla_attention`.

        ``kv_b_proj`` takes the place of the module's own up-projection.

        Raises:
            MLAInputError: Also if there is no up-projection, neither here nor in the module.
        """
        kv_b = self.kv_b_proj if kv_b_proj is None else kv_b_proj
        if kv_b is None:
            raise input_error("kv_b_proj", "None", "the up-projection, here or at construction")
        settings = {"dimensions": self.dimensions, "scale": self.scale, "backend": self.backend}
        return mla_attention(q, kv_c, k_pe, kv_b, metadata=metadata, **{**settings, **options})

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.dimensions}, scale={self.scale:.6g}, backend={self.backend}"


def _check_tensors(q: Any, **others: Any) -> None:
    for name, x in {"q": q, **others}.items():
        if not isinstance(x, torch.Tensor) and not (name != "q" and x is None):
            raise input_error(name, type(x).__name__, "a torch.Tensor")
    if q.dim() != 3:
        raise input_error("q", f"shape {tuple(q.shape)}", "packed, [T, N, P + R]")


def _check_devices(q: torch.Tensor, **others: Any) -> None:
    for name, x in others.items():
        if isinstance(x, torch.Tensor) and x.device != q.device:
            raise input_error(name, f"device {x.device}", f"q's device, {q.device}")


class _Buffers(NamedTuple):
    """A :class:`Workspace` as tensors; what a function projects into is its own."""

    latents: torch.Tensor
    kv: torch.Tensor
    partial: torch.Tensor
    carry: torch.Tensor


def _carve(workspace: torch.Tensor | None, shapes: Workspace, q: torch.Tensor) -> _Buffers:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dtypes = {"carry": wide}
    if workspace is None:
        return _Buffers(*(q.new_empty(getattr(shapes, name), dtype=dtypes.get(name, q.dtype)) for name in _Buffers._fields))
    sizes = dict(zip(shapes._fields, shapes.sizes(q.element_size()), strict=True))
    needed = sum(sizes.values())
    good = isinstance(workspace, torch.Tensor) and workspace.dtype == torch.uint8 and workspace.dim() == 1 and workspace.is_contiguous()
    if not good or workspace.device != q.device or workspace.numel() < needed or workspace.data_ptr() % 16:
        got = f"{tuple(workspace.shape)}, {workspace.dtype}, {workspace.device}" if isinstance(workspace, torch.Tensor) else type(workspace).__name__
        raise input_error("workspace", got, f"a contiguous uint8 tensor of at least {needed} bytes on {q.device}, aligned to 16 bytes")
    made, start = [], 0
    for name, size in sizes.items():
        if name in _Buffers._fields:
            shape, dtype = getattr(shapes, name), dtypes.get(name, q.dtype)
            used = torch.Size(shape).numel() * dtype.itemsize
            made.append(workspace[start : start + used].view(dtype).view(shape))
        start += size
    return _Buffers(*made)


def _with_rows_on(metadata: ContextMetadata, device: torch.device) -> ContextMetadata:
    """Metadata of the core has its rows on the host: they are copied once, and kept."""
    rows = metadata.rows
    if isinstance(rows, torch.Tensor):
        if rows.device != device:
            raise input_error("metadata", f"rows on {rows.device}", f"q's device, {device}", "See prepare_context_metadata's device.")
        return metadata
    return replace(metadata, rows=metadata.new.remember(("context rows", device), lambda: torch.as_tensor(rows, device=device)))


def _fold(state: tuple[Any, Any], first: int, out: Any, part_lse: Any) -> tuple[Any, Any]:
    whole, whole_lse = state
    target, target_lse = whole[first : first + out.shape[0]], whole_lse[:, first : first + out.shape[0]]
    lse.merge(target, target_lse, out, part_lse, out=target, lse=target_lse)
    return state
