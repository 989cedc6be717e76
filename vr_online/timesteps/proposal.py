"""From curves to the target q, the proposal p and the importance weights, and what to expect of them.

All arguments are (K,) float64 on one device; nothing here waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vr_online.timesteps.statistics import BinView


def smoothing_matrix(bins: int, width: float, device: torch.device | str = "cpu") -> Tensor:
    """(K, K) Gaussian kernel of `width` bins, each row summing to 1 (so edges are not pulled down)."""
    index = torch.arange(bins, dtype=torch.float64)
    if width <= 0:
        return torch.eye(bins, dtype=torch.float64, device=device)
    kernel = torch.exp(-0.5 * ((index[:, None] - index[None, :]) / width) ** 2)
    return (kernel / kernel.sum(1, keepdim=True)).to(device)


def normalized(curve: Tensor, fallback: Tensor) -> Tensor:
    """`curve` as masses summing to 1, or `fallback` where it is not finite or zero everywhere."""
    total = curve.sum()
    usable = total.isfinite() & (total > 0)
    return torch.where(usable, curve / torch.where(usable, total, 1.0), fallback)


def mixed(masses: Tensor, base: Tensor, floor: float) -> Tensor:
    """(1 - floor) * masses + floor * base, summing to 1."""
    mix = (1 - floor) * masses + floor * base
    return mix / mix.sum()


def importance_weights(q: Tensor, p: Tensor, correction: float) -> Tensor:
    """(q / p)^correction scaled to E_p[w] = 1; 1 in bins that p never draws.

    With p >= floor * q the ratio r = q / p is at most R = 1 / floor, and as E_p[r] = 1 the scale E_p[r^c] is at
    least R^(c - 1), so w <= R for every correction c in [0, 1].
    """
    drawn = p > 0
    ratio = (q / torch.where(drawn, p, 1.0)).pow(correction)
    weight = ratio / (p * ratio).sum()
    return torch.where(drawn, weight, 1.0)


def effective_share(p: Tensor, weight: Tensor) -> Tensor:
    """ess: expected (sum w)^2 / (n sum w^2), in (0, 1]."""
    return (p * weight).sum().square() / (p * weight.square()).sum()


def minibatch_variance(view: BinView, p: Tensor, weight: Tensor, stratified: bool) -> Tensor:
    """Variance of the weighted mean gradient times the batch size, predicted from the bins' statistics.

    Stratified: sum over bins of p w^2 grad_var. Independent: sum of p w^2 grad_sq - ||sum of p w mean||^2.
    """
    spread = view.grad_var if stratified else view.grad_sq
    second = torch.where(p > 0, p * weight.square() * spread, 0.0).sum()
    if stratified:
        return second
    return (second - mean_square(view, p * weight)).clamp(min=0)


def mean_square(view: BinView, mass: Tensor) -> Tensor:
    """Squared norm of the gradient averaged with `mass`, without the bias of its own sampling noise."""
    k = max(view.mean_sketch.shape[1], 1)
    norm = (mass[:, None] * view.mean_sketch).sum(0).square().sum() / k
    noise = torch.where(view.n_eff > 0, mass.square() * view.grad_var / view.n_eff.clamp(min=1), 0.0).sum()
    return (norm - noise).clamp(min=0)


def gain(view: BinView, q: Tensor, p: Tensor, weight: Tensor, stratified: bool) -> Tensor:
    """Predicted variance of the minibatch gradient, drawing from p with `weight`, over drawing from q plainly,
    both stratified or both independent. Below 1 is better; 1 where nothing is known yet."""
    plain = minibatch_variance(view, q, torch.ones_like(q), stratified)
    ours = minibatch_variance(view, p, weight, stratified)
    return torch.where(plain > 0, ours / torch.where(plain > 0, plain, 1.0), 1.0)


def best_gain(view: BinView, q: Tensor, stratified: bool) -> Tensor:
    """The gain of the best unbiased proposal: what adapting could at most bring."""
    spread = (view.grad_var if stratified else view.grad_sq).clamp(min=0).sqrt()
    p = normalized(q * spread, q)
    return gain(view, q, p, importance_weights(q, p, 1.0), stratified)
