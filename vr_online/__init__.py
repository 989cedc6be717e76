"""Training of latent flow models with online variance-reducing timestep sampling."""

__version__ = "0.1.0"
