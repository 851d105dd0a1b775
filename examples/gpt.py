"""A small GPT: RMSNorm, rotary positions, causal attention, SwiGLU, untied head. Knows no optimizer and no ranks.

Queries, keys, values, gate and up are separate matrices: Muon orthogonalizes each on its own.
"""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def rotate(x: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864) of x (batch, heads, seq, head_dim)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with `heads` heads of width // heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = (self.query, self.key, self.value)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in projections)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202) with about 8/3 times the width, a multiple of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-8 * width // 3 // 64) * 64
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width, eps=1e-6), Attention(width, heads)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(width, eps=1e-6), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocabulary)."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))
