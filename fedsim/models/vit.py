"""The vision transformer of Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedsim.models.base import Classifier, ModelPlugin, require_size
from fedsim.models.head import assemble
from fedsim.types import FedsimError

_EPS = 1e-6
_SPREAD = 0.02


@final
class ViT(ModelPlugin):
    """Passes patches, embedded with a learned position each, through blocks of self-attention.

    With norms before (`pre`) it is ViT, and computes what timm's `VisionTransformer` does; with
    norms after (`post`) its blocks are those of `torch.nn.TransformerEncoderLayer` and of Vaswani
    et al. There is no dropout in it. The default is small; ViT-B/16 is
    `{patch: 16, width: 768, depth: 12, heads: 12}`.
    """

    paper: ClassVar[str] = (
        "Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at "
        "Scale, ICLR 2021"
    )

    patch: Annotated[int, Field(gt=0, le=1024)] = 4
    """Side of a patch in pixels; it has to divide both sides of the image."""
    width: Annotated[int, Field(gt=0, le=8192)] = 128
    """Number of entries of a token."""
    depth: Annotated[int, Field(gt=0, le=64)] = 2
    """Number of blocks."""
    heads: Annotated[int, Field(gt=0, le=256)] = 4
    """Number of heads of each attention; it divides the width."""
    mlp_ratio: Annotated[int, Field(gt=0, le=16)] = 4
    """Hidden neurons of a block's two layers, in units of the width."""
    norm: Literal["pre", "post"] = "pre"
    """Whether a block normalizes before attention and layers, and at the end once more, or after
    each sum."""
    pool: Literal["class_token", "mean"] = "class_token"
    """What is classified: a token of its own, or the mean of all patches' tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ViT:
        if self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) do not divide the width ({self.width})")
        return self

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Builds the network with `width` features; a FedsimError if patches do not fill images."""
        require_size(f"vit with patches of {self.patch}", input_shape, self.patch)
        _, height, width = input_shape
        if height % self.patch or width % self.patch:
            raise FedsimError(
                f"model.patch: patches of {self.patch}x{self.patch} do not fill images of "
                f"{height}x{width}: use a divisor of both sides"
            )
        return assemble(_Body(self, input_shape), self.head, input_shape, num_classes)


class _Body(nn.Module):
    """Maps (B, C, H, W) to (B, width). Layers are named as in timm, so that its checkpoints fit."""

    def __init__(self, config: ViT, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = input_shape
        patches = (height // config.patch) * (width // config.patch)
        classed = config.pool == "class_token"
        self._pool = config.pool
        if classed:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + classed, config.width))
        self.patch_embed = _PatchEmbedding(channels, config.patch, config.width)
        self.blocks = nn.Sequential(*(_TransformerBlock(config) for _ in range(config.depth)))
        before = config.norm == "pre"
        # As in timm, a mean is normalized after it is taken.
        last = nn.LayerNorm(config.width, eps=_EPS) if before else nn.Identity()
        self.norm = last if classed else nn.Identity()
        self.fc_norm = nn.Identity() if classed else last
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.patch_embed(images)
        if self._pool == "class_token":
            tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
        tokens = self.norm(self.blocks(tokens + self.pos_embed))
        pooled = tokens[:, 0] if self._pool == "class_token" else tokens.mean(1)
        features: Tensor = self.fc_norm(pooled)
        return features

    def _initialize(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=_SPREAD)
        if self._pool == "class_token":
            nn.init.trunc_normal_(self.cls_token, std=_SPREAD)
        for part in self.blocks.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=_SPREAD)
                nn.init.zeros_(part.bias)


class _PatchEmbedding(nn.Module):
    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.proj(images)
        return embedded.flatten(2).transpose(1, 2)


class _TransformerBlock(nn.Module):
    def __init__(self, config: ViT) -> None:
        super().__init__()
        self._before = config.norm == "pre"
        self.norm1 = nn.LayerNorm(config.width, eps=_EPS)
        self.attn = _Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width, eps=_EPS)
        self.mlp = _Layers(config.width, config.mlp_ratio * config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        if self._before:
            tokens = tokens + self.attn(self.norm1(tokens))
            added: Tensor = tokens + self.mlp(self.norm2(tokens))
            return added
        tokens = self.norm1(tokens + self.attn(tokens))
        normed: Tensor = self.norm2(tokens + self.mlp(tokens))
        return normed


class _Attention(nn.Module):
    """Self-attention of operations that can be differentiated twice; the fused ones cannot."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        parts = self.qkv(tokens).reshape(batch, count, 3, self._heads, width // self._heads)
        # Each becomes (B, heads, n, width / heads).
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        # Vaswani et al. 2017, equation 1: scores are divided by the root of a head's width.
        scores = query @ key.transpose(-2, -1) * (width // self._heads) ** -0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, count, width)
        answer: Tensor = self.proj(mixed)
        return answer


class _Layers(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        answer: Tensor = self.fc2(self.act(self.fc1(tokens)))
        return answer
