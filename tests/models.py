"""Small transformers with random weights, in the spellings that matter to rotpass: one family with switches.

Weights are as unkind as real ones: biases that are not zero, outlier channels, an offset from zero.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LONGEST = 32, 24


@dataclasses.dataclass(frozen=True)
class Style:
    """How a model is spelled. ``hidden`` is not ``heads * head_dim`` unless a style makes it so."""

    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 128
    layers: int = 2
    fused: str = ""  # of q, k and v: "chunk", "split", "slice", "neox" (interleaved per head)
    gqa: str = "expand"  # "expand" (repeat_kv), "repeat_interleave", "enable" (enable_gqa=True), "none"
    mask: str = "bool"  # "bool", "float" (both causal, with padding), "causal" (is_causal), "none"
    scale: float | None = None
    rope: bool = True
    qk_norm: bool = False
    layer_norm: bool = False
    conv1d: bool = False  # GPT-2's transposed weights and addmm
    mlp: str = "gated"  # "gated", "swapped" (up * act(gate)), "fused" (gate_up), "gelu" (tanh, spelled out)
    cut: str = "chunk"  # of gate_up: "chunk", "split", "slice"
    bias: bool = True
    cache: str = ""  # "index_copy", "index_put", "slice" (a module's buffers), "cat", "inout"


STYLES = {
    "llama": Style(),
    "llama-interleave": Style(gqa="repeat_interleave", mask="float", mlp="swapped"),
    "llama-enable-gqa": Style(gqa="enable", mask="causal", scale=0.17),
    "qwen3": Style(qk_norm=True, head_dim=44, hidden=24, ffn=88, bias=False),
    "phi3": Style(fused="split", mlp="fused", kv_heads=2),
    "phi3-slice": Style(fused="slice", mlp="fused", cut="slice", mask="causal"),
    "phi3-chunk": Style(fused="chunk", mlp="fused", cut="split", kv_heads=4, gqa="none"),
    "gpt2": Style(
        fused="split", mlp="gelu", conv1d=True, rope=False, layer_norm=True, kv_heads=4, gqa="none", mask="causal"
    ),
    "neox": Style(fused="neox", mlp="gelu", layer_norm=True, kv_heads=4, gqa="none"),
}


class Conv1D(nn.Module):
    """A linear whose weight lies the other way round, as in GPT-2."""

    def __init__(self, inside: int, outside: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inside, outside))
        self.bias = nn.Parameter(torch.empty(outside))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.bias.shape[0])


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def rope_tables(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
    angles = positions.to(torch.float64)[:, None] * steps
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


class Attention(nn.Module):
    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = s = style
        linear = Conv1D if s.conv1d else nn.Linear
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        if s.fused:
            self.qkv_proj = linear(s.hidden, q + 2 * kv, bias=s.bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (linear(s.hidden, n, bias=s.bias) for n in (q, kv, kv))
        self.o_proj = linear(q, s.hidden, bias=s.bias)
        if s.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(s.head_dim), RMSNorm(s.head_dim)
        if s.cache in ("index_copy", "index_put", "slice"):
            for name in ("k_cache", "v_cache"):
                self.register_buffer(name, torch.zeros(2, s.kv_heads, LONGEST, s.head_dim))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.style
        if s.fused == "neox":
            return self.qkv_proj(x).unflatten(-1, (s.heads, 3 * s.head_dim)).transpose(1, 2).chunk(3, dim=-1)
        if s.fused:
            qkv, q, kv = self.qkv_proj(x), s.heads * s.head_dim, s.kv_heads * s.head_dim
            if s.fused == "chunk":
                parts = qkv.chunk(3, dim=-1)
            elif s.fused == "split":
                parts = qkv.split([q, kv, kv], dim=-1)
            else:
                parts = qkv[..., :q], qkv[..., q : q + kv], qkv[..., q + kv :]
        else:
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return tuple(part.view(*x.shape[:2], -1, s.head_dim).transpose(1, 2) for part in parts)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None):
        s = self.style
        q, k, v = self.project(x)
        if s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if s.rope:
            cos, sin = rope_tables(positions, s.head_dim, x.dtype)
            q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v, past = self.cached(k, v, positions, past)
        if s.gqa == "expand":
            k, v = repeat_kv(k, s.heads // s.kv_heads), repeat_kv(v, s.heads // s.kv_heads)
        elif s.gqa == "repeat_interleave":
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=s.mask == "causal", scale=s.scale, enable_gqa=s.gqa == "enable"
        )
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1)), past

    def cached(self, k: Tensor, v: Tensor, positions: Tensor, past: tuple[Tensor, Tensor] | None):
        s = self.style
        if s.cache == "cat":
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(past, (k, v)))
            return k, v, (k, v)
        if s.cache == "inout":
            k, v = (old.index_copy(2, positions, new) for old, new in zip(past, (k, v)))
            return k, v, (k, v)
        if not s.cache:
            return k, v, past
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            if s.cache == "index_copy":
                cache.index_copy_(2, positions, new)
            elif s.cache == "index_put":
                cache[:, :, positions] = new
            else:
                cache[:, :, : new.shape[2]] = new
        return self.k_cache, self.v_cache, past


class Mlp(nn.Module):
    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = s = style
        linear = Conv1D if s.conv1d else nn.Linear
        if s.mlp == "fused":
            self.gate_up_proj = linear(s.hidden, 2 * s.ffn, bias=s.bias)
        else:
            self.up_proj = linear(s.hidden, s.ffn, bias=s.bias)
            if s.mlp != "gelu":
                self.gate_proj = linear(s.hidden, s.ffn, bias=s.bias)
        self.down_proj = linear(s.ffn, s.hidden, bias=s.bias)

    def forward(self, x: Tensor) -> Tensor:
        s = self.style
        if s.mlp == "gelu":
            h = self.up_proj(x)
            return self.down_proj(0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3)))))
        if s.mlp == "fused":
            both = self.gate_up_proj(x)
            if s.cut == "chunk":
                gate, up = both.chunk(2, dim=-1)
            elif s.cut == "split":
                gate, up = both.split([s.ffn, s.ffn], dim=-1)
            else:
                gate, up = both[..., : s.ffn], both[..., s.ffn :]
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(up * F.silu(gate) if s.mlp == "swapped" else F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, style: Style) -> None:
        super().__init__()
        norm = nn.LayerNorm if style.layer_norm else RMSNorm
        self.attention_norm, self.mlp_norm = norm(style.hidden), norm(style.hidden)
        self.attention, self.mlp = Attention(style), Mlp(style)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None):
        y, past = self.attention(self.attention_norm(x), positions, mask, past)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), past


class Model(nn.Module):
    """Logits of token ids; with a cache that crosses the boundary, ``(logits, the cache of each layer)``."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style
        self.embed = nn.Embedding(VOCABULARY, style.hidden)
        if not style.rope:
            self.embed_positions = nn.Embedding(LONGEST, style.hidden)
        self.layers = nn.ModuleList(Block(style) for _ in range(style.layers))
        self.norm = (nn.LayerNorm if style.layer_norm else RMSNorm)(style.hidden)
        self.head = nn.Linear(style.hidden, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor | None = None, past: list | None = None):
        length = ids.shape[1]
        if positions is None:
            positions = torch.arange(length, device=ids.device)
        x = self.embed(ids)
        if not self.style.rope:
            x = x + self.embed_positions(positions)
        mask, present = self.mask(ids, positions, past, x.dtype), []
        for i, layer in enumerate(self.layers):
            x, kept = layer(x, positions, mask, None if past is None else past[i])
            present.append(kept)
        logits = self.head(self.norm(x))
        return logits if past is None else (logits, present)

    def mask(self, ids: Tensor, positions: Tensor, past: list | None, dtype: torch.dtype) -> Tensor | None:
        """Causal by position; a first token of 0 is padding, which nobody else attends to."""
        cache = self.style.cache
        if self.style.mask in ("causal", "none"):
            return None
        if cache == "cat":
            keys = torch.arange(past[0][0].shape[2] + ids.shape[1], device=ids.device)
        else:
            keys = torch.arange(LONGEST, device=ids.device) if cache else positions
        seen = keys[None, :] <= positions[:, None]
        if not cache:
            padded = (ids == 0)[:, None, None, :] & (keys[None, :] != positions[:, None])
            seen = seen & ~padded
        if self.style.mask == "bool":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def empty_past(self, length: int, batch: int = 2) -> list[tuple[Tensor, Tensor]]:
        """A cache of zeros to give to a model whose cache is an input."""
        s, dtype = self.style, self.head.weight.dtype
        shape = batch, s.kv_heads, length, s.head_dim
        return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(s.layers)]


def randomize_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights: outlier channels in every matrix, biases and norms away from their neutral values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            random = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.dim() == 1:
                value = 0.4 + 0.3 * random if name.endswith("bias") else 1 + 0.3 * random
            else:
                value = 0.05 / math.sqrt(p.shape[-1]) + random / math.sqrt(min(p.shape))
                value[torch.randint(len(value), (2,), generator=generator)] *= 5
            p.copy_(value)
    return model


def make(style: str | Style, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> Model:
    """A model in eval mode, of a named style with some fields changed."""
    style = STYLES[style] if isinstance(style, str) else style
    return randomize_(Model(dataclasses.replace(style, **changes)), seed).to(dtype).eval()


def tokens(length: int = 7, batch: int = 2, seed: int = 1) -> Tensor:
    """Token ids; the first of the first row is padding."""
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[0, 0] = 0
    return ids


def rotation_matrix(size: int, width: int | None = None, *, seed: int | None = None, table: str = "default") -> Tensor:
    """R diag(s), dense, in float64, in blocks along ``width``: a rotation is ``x @ rotation_matrix(...).T``."""
    import rotpass
    from rotpass.hadamard import signs

    if size & (size - 1) == 0:
        h = torch.from_numpy(scipy.linalg.hadamard(size).astype(np.float64))  # independent of the code under test
    else:
        h = rotpass.hadamard_matrix(size, table=table).to(torch.float64)
        assert torch.equal(h @ h.T, size * torch.eye(size, dtype=torch.float64)) and torch.equal(h.abs(), h * h)
    r = h / math.sqrt(size)
    if seed is not None:
        s = signs(size, seed).to(torch.float64)
        assert torch.equal(s.abs(), torch.ones_like(s)) and s.min() < 0 < s.max()
        r = r * s
    return torch.block_diag(*[r] * ((width or size) // size))
