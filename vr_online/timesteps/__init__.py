"""Where t is drawn: densities, the gradient probe, live statistics, the proposal and stratified draws.

This package needs nothing of the trainer; use it in any training loop (see `examples/`).
"""

__all__ = ["Draw", "OnlineSampler", "Probe", "attach_probe"]


def __getattr__(name: str):
    # Imported on use, so that checking a density spec does not load torch.
    if name in ("Draw", "OnlineSampler"):
        from vr_online.timesteps import sampler as module
    elif name in ("Probe", "attach_probe"):
        from vr_online.timesteps import probe as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
