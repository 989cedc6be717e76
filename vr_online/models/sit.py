"""SiT: a transformer over latent patches, conditioned through adaLN-Zero (Peebles & Xie 2023; Ma et al. 2024).

Parameter names and shapes are those of the published SiT checkpoints, so that their files load as they are.
`t` is raw time in [0, 1] in this project's direction (0 noise, 1 data), which is also that of the checkpoints.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vr_online.errors import UserError

if TYPE_CHECKING:
    from vr_online.config import ModelConfig

FREQUENCIES = 256
"""Length of the sinusoidal embedding of t."""

MLP_RATIO = 4


class Size(NamedTuple):
    """Depth, width, heads and patch side of one architecture."""

    depth: int
    hidden_size: int
    num_heads: int
    patch_size: int


PUBLISHED = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}


def model_size(config: "ModelConfig") -> Size:
    """The dimensions that `config` names, published (`SiT-XL/2`) or `custom`."""
    if config.name == "custom":
        return Size(config.depth, config.hidden_size, config.num_heads, config.patch_size)
    letters, patch = config.name.removeprefix("SiT-").split("/")
    return Size(*PUBLISHED[letters], int(patch))


def sincos_positions(width: int, rows: int, columns: int) -> Tensor:
    """Fixed positions (1, rows * columns, width), float32: half the channels for the column, half for the row.

    Each half is sin, then cos, of coordinate / 10000^(k / (width / 4)) (Vaswani et al. 2017 in two dimensions).
    """
    quarter = width // 4
    omega = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)

    def axis(positions: Tensor) -> Tensor:
        angle = positions.to(torch.float64)[:, None] * omega
        return torch.cat([angle.sin(), angle.cos()], dim=1)

    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.cat([axis(column.flatten()), axis(row.flatten())], dim=1).float()[None]


def time_features(t: Tensor) -> Tensor:
    """Cosines then sines of t (B,) at geometric frequencies, (B, 256), always float32."""
    half = FREQUENCIES // 2
    frequency = torch.exp(-math.log(10000.0) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    angle = t.float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Tokens (B, N, D) scaled and shifted per sample and channel, (B, D) each."""
    return x * (1 + scale[:, None]) + shift[:, None]


class PatchEmbed(nn.Module):
    """Latents (B, C, H, W) to tokens (B, N, D), one a patch, row by row."""

    def __init__(self, channels: int, width: int, patch_size: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """Times (B,) to vectors (B, D). The sinusoids are float32 whatever the dtype of the weights."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp(time_features(t).to(dtype))


class LabelEmbedder(nn.Module):
    """Labels (B,) to vectors (B, D); the last row is the null class."""

    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)


class Attention(nn.Module):
    """Multi-head self-attention over tokens (B, N, D)."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Two linear layers around a tanh-approximated GELU."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition (B, D)."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_attn[:, None] * self.attn(modulate(self.norm1(x), shift_attn, scale_attn))
        return x + gate_mlp[:, None] * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    """Tokens to patches (B, N, patch^2 * channels)."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class SiT(nn.Module):
    """The network of one `Size` for latents of `latent_shape` (C, H, W), square or not.

    Initial weights are a function of the global torch generator: call `torch.manual_seed` first.
    `checkpoint_activations` recomputes each block in backward; `compile_blocks()` compiles them.

    Raises:
        UserError: the patch does not divide the latent.
    """

    def __init__(self, size: Size, latent_shape: Sequence[int], num_classes: int, *,
                 learn_sigma: bool = False, checkpoint_activations: bool = False):
        super().__init__()
        channels, height, width = latent_shape
        if height % size.patch_size or width % size.patch_size:
            raise UserError(f"model: patch size {size.patch_size} does not divide the latent {height} x {width}; choose a smaller patch")
        self.size, self.latent_shape, self.num_classes = size, tuple(latent_shape), num_classes
        self.out_channels = channels * (2 if learn_sigma else 1)
        self.checkpoint_activations = checkpoint_activations
        self.grid = (height // size.patch_size, width // size.patch_size)
        self.x_embedder = PatchEmbed(channels, size.hidden_size, size.patch_size)
        self.t_embedder = TimestepEmbedder(size.hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, size.hidden_size)
        # A constant of the shape, so a buffer: it has no gradient, optimizer state or average to keep.
        self.register_buffer("pos_embed", sincos_positions(size.hidden_size, *self.grid))
        self.blocks = nn.ModuleList(SiTBlock(size.hidden_size, size.num_heads) for _ in range(size.depth))
        self.final_layer = FinalLayer(size.hidden_size, size.patch_size**2 * self.out_channels)
        self._initialise()

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Prediction (B, C or 2C, H, W) in the weights' dtype.

        Args:
            x: (B, C, H, W) normalised latents at time t, any floating dtype.
            t: (B,) times in [0, 1], float32.
            y: (B,) int64 class indices; `num_classes` is the null class.
        """
        dtype = self.x_embedder.proj.weight.dtype
        h = self.x_embedder(x.to(dtype)) + self.pos_embed.to(dtype)
        c = self.t_embedder(t, dtype) + self.y_embedder(y)
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                h = checkpoint(block, h, c, use_reentrant=False)
            else:
                h = block(h, c)
        return self._unpatch(self.final_layer(h, c))

    def compile_blocks(self) -> None:
        """Compiles each block on its first call; names in the state dict stay as they are."""
        for block in self.blocks:
            block.compile()

    def _unpatch(self, x: Tensor) -> Tensor:
        (rows, columns), p = self.grid, self.size.patch_size
        x = x.view(x.shape[0], rows, columns, p, p, self.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], self.out_channels, rows * p, columns * p)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.view(self.size.hidden_size, -1))
        nn.init.zeros_(self.x_embedder.proj.bias)
        for weight in (self.y_embedder.embedding_table.weight, self.t_embedder.mlp[0].weight, self.t_embedder.mlp[2].weight):
            nn.init.normal_(weight, std=0.02)
        # adaLN-Zero: every block starts as the identity, the output as zero.
        for layer in [block.adaLN_modulation[1] for block in self.blocks] + [self.final_layer.adaLN_modulation[1], self.final_layer.linear]:
            nn.init.zeros_(layer.weight)


def build_sit(config: "ModelConfig", latent_shape: Sequence[int], num_classes: int | None = None) -> SiT:
    """The model a configuration asks for. `num_classes` is the data's; `config.num_classes` may be larger.

    Does not load `config.init`: see `vr_online.models.weights.load_init`.

    Raises:
        UserError: no class count is known, the model has fewer classes than the data, or the patch does not fit.
    """
    classes = config.num_classes or num_classes
    if not classes:
        raise UserError("model.num_classes: the data names no classes, so give their number")
    if num_classes and classes < num_classes:
        raise UserError(f"model.num_classes: {classes} is less than the {num_classes} classes of the data")
    model = SiT(model_size(config), latent_shape, classes, learn_sigma=config.learn_sigma,
                checkpoint_activations=config.checkpoint_activations)
    if config.compile:
        model.compile_blocks()
    return model


def drop_labels(y: Tensor, p: float, num_classes: int, generator: torch.Generator | None = None) -> Tensor:
    """`y` (B,) with each label replaced, independently with probability `p`, by the null class."""
    device = y.device if generator is None else generator.device
    dropped = torch.rand(y.shape, generator=generator, device=device) < p
    return torch.where(dropped.to(y.device), num_classes, y)


def forward_macs(config: "ModelConfig", latent_shape: Sequence[int]) -> int:
    """Multiply-accumulates of one forward pass of one image, attention included.

    This is the count behind the "Gflops" of the DiT and SiT tables; a training step costs about 6 times as many
    floating-point operations.
    """
    depth, width, _, patch = model_size(config)
    channels, height, columns = latent_shape
    tokens = (height // patch) * (columns // patch)
    outputs = patch**2 * channels * (2 if config.learn_sigma else 1)
    block = (4 + 2 * MLP_RATIO) * width**2 * tokens + 2 * tokens**2 * width + 6 * width**2
    ends = tokens * width * (patch**2 * channels + outputs) + FREQUENCIES * width + 3 * width**2
    return depth * block + ends
