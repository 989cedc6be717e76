"""The zero probe: a sketch of every sample's parameter gradient, out of the ordinary backward pass.

For k random vectors u_a and k random vectors v_b of each tapped `nn.Linear`, with E u u^T = 1 = E v v^T, the
derivatives of sample i's loss along the k^2 rank-one directions u_a v_b^T of the weight are

    s_iba = sum over tokens of (x v_b) (dL/dy u_a) = u_a^T G_i v_b,

with G_i the sample's gradient of the weight, and E s_iba^2 = ||G_i||_F^2 over the draw of directions. It is the
gradient that a matrix `probe` (B, k, k) of zeros would get in y = x W^T + b + (x V) probe U^T. Here the tap is an
identity whose backward computes just that gradient, so the forward pass is untouched, bit for bit. All taps share
one probe: their sketches add up, and the mean of s_i^2 estimates the squared norm over all tapped layers.

Pairing every u with every v costs next to nothing beyond the two thin products x V and dL/dy U, and leaves far
less noise than the k pairs (u_a, v_a) alone. The u of a layer are orthogonal to each other, and so are the v, which
leaves less than independent signs: none at all on a side no wider than k, such as a last layer's few outputs.
`tools/bench_probe.py` measures both.
"""

from __future__ import annotations

import fnmatch
import hashlib

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vr_online.config import ProbeConfig
from vr_online.errors import UserError


class _Tap(torch.autograd.Function):
    """Identity in y; hands `probe` (B, k^2) its gradient."""

    @staticmethod
    def forward(ctx, y: Tensor, x: Tensor, probe: Tensor, u: Tensor, v: Tensor) -> Tensor:
        # Under autocast x is wider than the layer's own saved copy; keep the narrow one.
        ctx.save_for_backward(x.to(y.dtype), u, v)
        # The same memory, but no view in autograd's eyes: a view made here may not be modified in place later.
        return y.data

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, u, v = ctx.saved_tensors
        left = (x @ v.to(x.dtype)).float()
        right = (grad @ u.to(grad.dtype)).float()
        if x.dim() == 2:
            left, right = left[:, None], right[:, None]
        sketch = left.flatten(1, -2).transpose(1, 2) @ right.flatten(1, -2)
        return grad, None, sketch.flatten(1), None, None


class _State:
    """What all taps of one probe share: the armed tensor, or None."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Tensor | None = None


def _tap(module: nn.Linear, inputs: tuple, output: Tensor) -> Tensor | None:
    """Forward hook. One function for all layers, data on the module, so that compiled blocks share their code."""
    value = module._probe_state.value
    if value is None or not torch.is_grad_enabled():
        return None
    x = inputs[0]
    if x.dim() < 2 or x.shape[0] != value.shape[0]:
        raise ValueError(
            f"the probe is armed for {value.shape[0]} samples, but a tapped layer got {tuple(x.shape)}: draw as many "
            "times as the batch has samples, and leave layers whose input does not start with the batch out of probe.layers"
        )
    return _Tap.apply(output, x, value, module._probe_u, module._probe_v)


class Probe:
    """The taps of one model. `OnlineSampler` arms it in `draw` and reads it in `update`.

    Attributes:
        k: random vectors on each side of a layer.
        size: k^2, the length of a sketch.
        layers: names of the tapped layers.
    """

    def __init__(self, state: _State, k: int, layers: list[str], handles: list, modules: list[nn.Linear]) -> None:
        self.k, self.size = k, k * k
        self.layers = layers
        self._state = state
        self._handles = handles
        self._modules = modules

    def arm(self, batch_size: int, device: torch.device | str) -> None:
        """The next forward pass with gradients, of `batch_size` samples, is sketched."""
        self._state.value = torch.zeros(batch_size, self.size, device=device, requires_grad=True)

    def read(self) -> Tensor:
        """(B, k^2) float32 gradient of the probe since `arm`, and disarms.

        Raises:
            RuntimeError: no backward pass went through a tapped layer.
        """
        value, self._state.value = self._state.value, None
        if value is None or value.grad is None:
            raise RuntimeError(
                "the probe saw no backward pass: call draw, forward, backward and update in this order, on the probed model"
            )
        return value.grad

    def disarm(self) -> None:
        """Forward passes are no longer sketched."""
        self._state.value = None

    def remove(self) -> None:
        """Takes the taps out of the model."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            del module._probe_state, module._probe_u, module._probe_v
        self._handles, self._modules = [], []


def _matches(name: str, patterns: list[str]) -> bool:
    wanted = [p for p in patterns if not p.startswith("!")] or ["*"]
    refused = [p[1:] for p in patterns if p.startswith("!")]
    return any(fnmatch.fnmatchcase(name, p) for p in wanted) and not any(fnmatch.fnmatchcase(name, p) for p in refused)


def _directions(size: int, k: int, key: str) -> Tensor:
    """(size, k) random columns u with E u u^T = 1, orthogonal in groups of up to `size`."""
    # torch's CPU generator uses 32 bits of its seed, so they must be hashed from all of the key.
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    groups = []
    for start in range(0, k, size):
        q, r = torch.linalg.qr(torch.randn(size, min(size, k - start), generator=generator, dtype=torch.float64))
        groups.append(q * r.diagonal().sign())  # the one QR whose R has a positive diagonal, on every machine
    return (torch.cat(groups, 1) * size**0.5).float()


def _install(name: str, module: nn.Linear, state: _State, k: int, seed: int):
    if hasattr(module, "_probe_state"):
        raise RuntimeError(f"{name} is tapped already: remove the first probe, or share it")
    device = module.weight.device
    module.register_buffer("_probe_u", _directions(module.out_features, k, f"{seed} {name} out").to(device), persistent=False)
    module.register_buffer("_probe_v", _directions(module.in_features, k, f"{seed} {name} in").to(device), persistent=False)
    module._probe_state = state
    return module.register_forward_hook(_tap)


def attach_probe(model: nn.Module, config: ProbeConfig | None = None, seed: int = 0) -> Probe:
    """Taps the `nn.Linear`s of `model` whose names match `config.layers`.

    Parameters, state dict and outputs stay as they are. Attach before the model is compiled or wrapped; names
    are those of `model.named_modules()`. The directions depend on (seed, layer name) alone, so all ranks hold
    the same. A layer's input must start with the batch: (B, d) or (B, ..., d).

    Args:
        config: k and name patterns (shell style; one that starts with `!` excludes).

    Raises:
        UserError: no layer matches.
    """
    config = config or ProbeConfig()
    linears = {n.replace("_orig_mod.", ""): m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = {n: m for n, m in linears.items() if _matches(n, config.layers)}
    if not chosen:
        shown = ", ".join(list(linears)[:12]) or "none"
        raise UserError(f"timesteps.probe.layers {config.layers} matches no nn.Linear of the model; it has: {shown}")
    state = _State()
    handles = [_install(name, module, state, config.k, seed) for name, module in chosen.items()]
    return Probe(state, config.k, list(chosen), handles, list(chosen.values()))
