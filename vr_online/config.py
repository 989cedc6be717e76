"""The run's YAML as validated models: one place for every key, its meaning and its default.

`load_config` reads a file, applies `key.sub=value` overrides and validates the result before any
device work. Anything unknown, of a wrong type or contradictory raises `ConfigError`, whose message
names the key, the value and, for an unknown key, the nearest valid one.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, Literal, Optional, Union

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from vr_online.errors import UserError


class ConfigError(UserError):
    """A configuration that cannot be run. The message is meant for the person who wrote it."""


class Section(BaseModel):
    """Strict base of every section: no unknown keys, no silent type conversion."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class DataConfig(Section):
    shards: Union[str, list[str]] = "data/shards"
    """Folder that holds the tars and `dataset.json`, or a list of tar paths, URLs or `pipe:` commands
    (braces such as `part-{0000..0063}.tar` are expanded)."""
    dataset: Optional[str] = None
    """Path or URL of `dataset.json` when it does not lie beside the shards."""
    codec: Optional[str] = None
    """Codec id the shards must have been written with; a disagreement stops the run. null accepts any."""
    norm: Optional[dict[str, list[float]]] = None
    """Expected latent normalisation `{mean: [...], std: [...]}`; a disagreement with the shards stops the run."""
    flip: bool = False
    """Mirror each latent with probability one half, keyed by (seed, epoch, sample). Valid for pixel latents;
    for autoencoder latents write both flips when encoding instead."""
    mode: Literal["permutation", "resampled"] = "permutation"
    """`permutation`: every sample once per epoch, in an order that depends on (seed, epoch) and resumes exactly.
    `resampled`: shards drawn with replacement for ever."""
    shuffle: int = Field(4096, ge=1)
    """Samples that wait in each worker's shuffle buffer; 1 keeps the stored order within a worker. Larger mixes
    further and takes more memory (`tools/shuffle_quality.py`). It may change between a run and its resume."""
    workers: int = Field(2, ge=0)
    """Reader processes per rank; 0 reads in the training process. Ranks x workers may not exceed the shards."""
    prefetch: int = Field(4, ge=1)
    """Batches each worker keeps ready."""
    allow_pipe: bool = False
    """Let `pipe:` shards run their shell command. Off, such a shard is refused."""
    on_error: Literal["stop", "skip"] = "stop"
    """A broken shard stops the run with its name, or is skipped: what was whole before the damage is used, the rest
    counted."""
    timeout: float = Field(60.0, gt=0)
    """Seconds one read from a remote shard may take before it is retried."""
    retries: int = Field(5, ge=0)
    """Attempts after a failed remote read, with exponential back-off."""


class ModelConfig(Section):
    name: str = "SiT-S/2"
    """`SiT-{S,B,L,XL}/{1,2,4,8}`, or `custom` with depth, hidden_size, num_heads and patch_size given."""
    depth: Optional[int] = Field(None, ge=1)
    """Blocks; only with `name: custom`."""
    hidden_size: Optional[int] = Field(None, ge=2)
    """Width; only with `name: custom`."""
    num_heads: Optional[int] = Field(None, ge=1)
    """Attention heads; only with `name: custom`."""
    patch_size: Optional[int] = Field(None, ge=1)
    """Patch side in latent pixels; only with `name: custom`."""
    num_classes: Optional[int] = Field(None, ge=1)
    """Classes; null takes the number in `dataset.json`."""
    label_drop: float = Field(0.1, ge=0, le=1)
    """Probability that a sample's label becomes the null class (for classifier-free guidance)."""
    learn_sigma: bool = False
    """Twice the output channels, the second half unused, as in the official SiT checkpoints."""
    init: Optional[str] = None
    """Start from these weights: an official SiT `.pt`, a `.safetensors`, or a checkpoint folder of ours."""
    checkpoint_activations: bool = False
    """Recompute each block's activations in backward (non-reentrant): less memory, about a third more compute."""
    compile: bool = False
    """`torch.compile` the blocks."""

    @model_validator(mode="after")
    def _dimensions(self) -> "ModelConfig":
        given = {k: getattr(self, k) for k in ("depth", "hidden_size", "num_heads", "patch_size")}
        if self.name == "custom":
            missing = [k for k, v in given.items() if v is None]
            if missing:
                raise ValueError(f"name: custom needs {', '.join(missing)}")
            if self.hidden_size % self.num_heads:
                raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
            if self.hidden_size % 4:
                raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of 4 (sin-cos positions need it)")
        else:
            if not re.fullmatch(r"SiT-(S|B|L|XL)/(1|2|4|8)", self.name):
                raise ValueError(f"name {self.name!r} is neither SiT-{{S,B,L,XL}}/{{1,2,4,8}} nor custom")
            extra = [k for k, v in given.items() if v is not None]
            if extra:
                raise ValueError(f"{', '.join(extra)} may be given only with name: custom (name is {self.name!r})")
        return self


class FlowConfig(Section):
    path: Literal["linear", "gvp", "vp"] = "linear"
    """Interpolant x_t = alpha_t x_1 + sigma_t x_0; t = 0 is noise, t = 1 is data."""
    prediction: Literal["velocity", "noise", "data"] = "velocity"
    """What the network outputs, and the space the squared error is taken in."""


class ProbeConfig(Section):
    """Sketch of the per-sample parameter gradient (DESIGN: zero probe)."""

    k: int = Field(16, ge=1)
    """Random orthogonal vectors on each side of a tapped layer; their k x k pairs are the directions of the sketch."""
    enabled: Optional[bool] = None
    """null attaches the probe where the target or the proposal needs it, true also only to watch the variance over t (1 to
    7 % of a step, least in wide models), false never."""
    layers: list[str] = Field(
        ["*", "!*.attn.qkv", "!*.mlp.fc2", "!blocks.*[13579].attn.proj", "!blocks.*[13579].mlp.fc1"], min_length=1
    )
    """Shell-style patterns of the names of the `nn.Linear`s to tap; one that starts with `!` excludes. In a SiT the
    default taps every layer that sees one vector a sample, and of those that see all tokens the narrower two in every
    other block: nearly as good as all layers, at a third of the cost (tools/bench_probe.py)."""


class TimestepConfig(Section):
    bins: int = Field(32, ge=1)
    """K equal cells of [0, 1]; target and proposal are constant on each."""
    target: str = "learnable"
    """Density q(t) that the objective is: `uniform`, `logit_normal(m, s)`, `mode(s)`, `cosmap`, `shift(alpha)`,
    `beta(a, b)`, `table(file)`, `vr_static(file)`, or learned live: `learnable(power, tilt)`, `progress(power)`,
    `frontier(power, tilt, progress)`, `information(power)`, `signal(power)`, `agreement(power)`, `grad_variance(power)`,
    `entropy_rate(c)`."""
    proposal: str = "same"
    """Density p(t) that t is drawn from: `same` (as the target), `online_vr`, `loss_second_moment`, `loss_ema`,
    or any fixed density of `target`."""
    correction: float = Field(1.0, ge=0, le=1)
    """Exponent of the importance weight (q/p)^correction: 1 is unbiased for q, 0 only draws."""
    draws: Literal["stratified", "iid"] = "stratified"
    """One systematic sample over the global batch, or independent draws."""
    floor: float = Field(0.2, gt=0, le=1)
    """Share of q mixed into p, so that no weight exceeds 1 / floor."""
    target_floor: float = Field(0.05, gt=0, le=1)
    """Share of the uniform density mixed into a learned target, so that no time is ever forgotten."""
    anneal: Optional[list[int]] = Field(None, min_length=2, max_length=2)
    """Images between which the target gives way, linearly, to the uniform density; twice the same number switches.
    null never does."""
    smooth: float = Field(0.5, ge=0)
    """Width, in bins, of the smoothing over neighbouring bins; 0 for none."""
    half_life: float = Field(100_000, gt=0)
    """Images over which, at the mean visiting rate, a bin's statistics lose half their weight. Less at the start
    of a run: never more than a quarter of what the bin has seen."""
    warmup: float = Field(8, ge=1)
    """Effective samples every bin needs before p leaves q."""
    update_every: int = Field(1, ge=1)
    """Steps between two changes of the proposal."""
    probe: ProbeConfig = ProbeConfig()

    @field_validator("target", "proposal")
    @classmethod
    def _spec(cls, spec: str, info: ValidationInfo) -> str:
        from vr_online.timesteps import rules

        (rules.parse_target if info.field_name == "target" else rules.parse_proposal)(spec)
        return spec

    @property
    def wants_probe(self) -> bool:
        """Whether a run attaches the probe."""
        from vr_online.timesteps import rules

        needed = rules.need_probe(rules.parse_target(self.target), rules.parse_proposal(self.proposal))
        return bool(needed) if self.probe.enabled is None else self.probe.enabled

    @field_validator("anneal")
    @classmethod
    def _anneal(cls, between: Optional[list[int]]) -> Optional[list[int]]:
        if between is not None and not 0 <= between[0] <= between[1]:
            raise ValueError("give two numbers of images, the smaller first")
        return between

    @model_validator(mode="after")
    def _memory(self) -> "TimestepConfig":
        # Decay by half per half_life / bins samples leaves about 2.9 times as many effective ones.
        longest = 2.9 * self.half_life / self.bins
        if longest < self.warmup:
            raise ValueError(
                f"half_life {self.half_life:g} images over {self.bins} bins keeps {longest:.3g} effective samples a bin, "
                f"which never reaches warmup {self.warmup:g}: raise half_life, or lower bins or warmup"
            )
        return self


class TrainConfig(Section):
    images: Optional[int] = Field(None, ge=1)
    """Length of the run in images. Give this or `steps`."""
    steps: Optional[int] = Field(None, ge=1)
    """Length of the run in optimizer steps. Give this or `images`."""
    batch_size: int = Field(256, ge=1)
    """Global batch: ranks x accumulation x micro-batch."""
    micro_batch_size: Optional[int] = Field(None, ge=1)
    """Samples per rank and forward pass; null means no accumulation."""
    clip: Optional[float] = Field(1.0, gt=0)
    """Largest norm of the whole gradient; null for no clipping."""
    max_skipped: int = Field(20, ge=1)
    """Stop after this many non-finite steps in a row."""

    @model_validator(mode="after")
    def _length(self) -> "TrainConfig":
        if (self.images is None) == (self.steps is None):
            raise ValueError("give exactly one of images and steps")
        if self.images is not None and self.images < self.batch_size:
            raise ValueError(f"images {self.images} is less than one batch_size {self.batch_size}")
        return self

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else -(-self.images // self.batch_size)


class OptimizerConfig(Section):
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate of AdamW."""
    betas: list[float] = Field([0.9, 0.999], min_length=2, max_length=2)
    """AdamW's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup: int = Field(0, ge=0)
    """Images of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a half cosine to `lr_min` at the run's end."""
    lr_min: float = Field(0.0, ge=0)
    """Last learning rate of the cosine."""

    @model_validator(mode="after")
    def _ends(self) -> "OptimizerConfig":
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min {self.lr_min} is above lr {self.lr}")
        return self

    @field_validator("betas")
    @classmethod
    def _betas(cls, betas: list[float]) -> list[float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each beta must lie in [0, 1)")
        return betas


class EmaConfig(Section):
    kind: Literal["constant", "power"] = "constant"
    """`constant`: exponential with `half_life`; `power`: EDM2's power function of relative width `sigma_rel`."""
    half_life: float = Field(1_774_000, gt=0)
    """Images over which a weight's share in the average halves (1.774 M is decay 0.9999 at batch 256)."""
    rampup: Optional[float] = Field(0.05, gt=0)
    """Half-life is at most this share of the images seen, so that short runs average too; null for none."""
    sigma_rel: float = Field(0.10, gt=0, lt=0.289)
    """Relative width of the power-function average (EDM2 equation 6; below 1/sqrt(12))."""


DEEPSPEED_KEYS_SET_ELSEWHERE = {
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.batch_size and train.micro_batch_size",
    "gradient_clipping": "train.clip",
    "optimizer": "the section optimizer",
    "scheduler": "optimizer.schedule",
    "bf16": "engine.precision",
    "fp16": "engine.precision",
    "zero_optimization.stage": "engine.zero_stage",
    "zero_optimization.sub_group_size": "the trainer (one flat shard, so that the gradient's norm is whole)",
}


class EngineConfig(Section):
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute precision; master weights, optimizer state, EMA and t are always fp32."""
    deepspeed: dict[str, Any] = {}
    """Further DeepSpeed keys, merged over the generated ones (bucket sizes, communication data type, ...)."""

    @field_validator("deepspeed")
    @classmethod
    def _not_ours(cls, keys: dict[str, Any]) -> dict[str, Any]:
        for ours, instead in DEEPSPEED_KEYS_SET_ELSEWHERE.items():
            node: Any = keys
            for part in ours.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if node is not None:
                raise ValueError(f"{ours} is set by {instead}, not here")
        return keys


class CheckpointConfig(Section):
    every: int = Field(10_000, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints kept."""
    keep_every: Optional[int] = Field(None, ge=1)
    """Also keep for ever every checkpoint whose step is a multiple of this."""
    resume: bool = True
    """Continue from the newest whole checkpoint in the run directory."""


class MonitorConfig(Section):
    log_every: int = Field(50, ge=1)
    """Steps between lines of `metrics.jsonl` and TensorBoard points; the only steps that wait for the device."""
    samples_every: Optional[int] = Field(None, ge=1)
    """Steps between sample grids from the EMA weights in TensorBoard; null for none."""
    samples_steps: int = Field(50, ge=1)
    """Solver steps (Heun) of those grids."""
    samples_cfg: float = Field(1.0, ge=0)
    """Guidance scale of those grids."""
    samples_per_class: int = Field(8, ge=1)
    """Columns of the grid; its rows are up to ten classes."""
    peak_tflops: Optional[float] = Field(None, gt=0)
    """Device peak for MFU; null looks the device up, and leaves MFU out where it is unknown."""


class EvaluationConfig(Section):
    every: Optional[int] = Field(None, ge=1)
    """Steps between evaluations (each needs a checkpoint, written if none is due); null for none."""
    mode: Literal["inline", "detached"] = "inline"
    """`inline`: all ranks sample between two steps. `detached`: another process evaluates the checkpoint."""
    n: int = Field(50_000, ge=2)
    """Samples generated, exactly."""
    batch_size: int = Field(64, ge=1)
    """Samples per forward pass and rank."""
    weights: Literal["ema", "raw"] = "ema"
    """Weights judged."""
    solver: Literal["euler", "heun", "dopri5", "euler_maruyama"] = "heun"
    """ODE or SDE solver."""
    steps: int = Field(50, ge=1)
    """Steps of a fixed-step solver."""
    rtol: float = Field(1e-3, gt=0)
    """Relative tolerance of dopri5."""
    atol: float = Field(1e-6, gt=0)
    """Absolute tolerance of dopri5."""
    diffusion: Literal["constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing"] = "sbdm"
    """Diffusion coefficient of the SDE (SiT, table of coefficients); the published SiT numbers are with `sigma`."""
    last_step: Literal["mean", "tweedie", "euler", "none"] = "mean"
    """How the SDE takes its last step."""
    last_step_size: float = Field(0.04, ge=0, lt=1)
    """Length of the SDE's last step."""
    cfg: float = Field(1.0, ge=0)
    """Classifier-free guidance scale; 1 is none."""
    cfg_interval: list[float] = Field([0.0, 1.0], min_length=2, max_length=2)
    """Times t between which guidance acts."""
    labels: Literal["balanced", "random"] = "balanced"
    """Classes of the samples: as even as n allows, or drawn."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of the integrator's state."""
    features: str = "latent"
    """Feature extractor: `latent`, `inception(path)`, `effnet_lite0` (96 px; `effnet_lite0(224)`), `torchscript(path)` or
    `torchscript(path, size)`."""
    resize: Literal["clean", "legacy_tensorflow", "legacy_pytorch"] = "clean"
    """clean-fid's resize mode, for image features."""
    reference: Optional[str] = None
    """Reference statistics: npz from `vr-online fid stats`, clean-fid or ADM; or a folder of latent shards or images, whose
    statistics are computed once. null takes the shards of `data`, if they lie in a local folder with their dataset.json."""
    codec_path: Optional[str] = None
    """Where the codec's weights are on this machine; null takes the place recorded in `dataset.json`."""
    metrics: list[Literal["fd", "kid", "is", "pr"]] = ["fd"]
    """What to compute beside the Frechet distance `fd`: `kid`, `is` (Inception Score), `pr` (precision, recall)."""
    seed: int = 0
    """Image i is drawn from seed + i, whatever the number of ranks or the batch size."""
    keep: int = Field(0, ge=0)
    """Newest evaluations whose generated images stay on disk, all n of them; results and a sample grid always stay."""
    keep_format: Literal["npz", "png"] = "npz"
    """As `samples.npz` (array `arr_0`, what ADM's evaluator reads) or as a folder `samples` of PNGs."""
    device: Optional[str] = None
    """Device of a detached local job, such as `cuda:1` or `cpu`."""
    command: Optional[str] = None
    """Template of the command that starts a detached job, such as
    `sbatch --wrap "vr-online fid {run} --steps {step}"`; null starts a local process."""
    wait_at_end: bool = True
    """Let the run wait for detached jobs still running when training ends."""

    @field_validator("cfg_interval")
    @classmethod
    def _interval(cls, interval: list[float]) -> list[float]:
        if not 0 <= interval[0] <= interval[1] <= 1:
            raise ValueError("give two times in [0, 1], the smaller first")
        return interval

    @model_validator(mode="after")
    def _sde_steps(self) -> "EvaluationConfig":
        if self.solver == "euler_maruyama" and self.last_step_size > 0 and self.steps < 2:
            raise ValueError("steps: euler_maruyama needs at least 2, since the last one is of length last_step_size")
        return self


class Config(Section):
    """Everything a run is."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run; its directory is `runs/<name>` unless `run_dir` says otherwise."""
    run_dir: Optional[str] = None
    """Run directory."""
    seed: int = Field(0, ge=0)
    """Seed of initial weights, data order, noise, times and label drop."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    flow: FlowConfig = FlowConfig()
    timesteps: TimestepConfig = TimestepConfig()
    train: TrainConfig = TrainConfig(steps=400_000)
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def directory(self) -> Path:
        return Path(self.run_dir) if self.run_dir else Path("runs") / self.name

    @model_validator(mode="after")
    def _contradictions(self) -> "Config":
        total_images = self.train.total_steps * self.train.batch_size
        if self.optimizer.warmup >= total_images and self.optimizer.warmup > 0:
            raise ValueError(f"optimizer.warmup {self.optimizer.warmup} images is not shorter than the run ({total_images} images)")
        if self.evaluation.every and not self.evaluation.reference and self.evaluation.features != "latent":
            raise ValueError("evaluation.every is set, so evaluation.reference must name reference statistics (make them with `vr-online fid stats`)")
        return self


class _Loader(yaml.SafeLoader):
    """YAML with YAML 1.2 floats (`1e-4` is a number, as people expect) and duplicate keys refused."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*)(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict:
    seen: set = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_Loader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, lambda loader, node: _construct_mapping(loader, node, deep=True)
)


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from None


def _apply_override(tree: dict, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    node[leaf] = _parse_yaml(value, f"override {override!r}")


def _valid_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _valid_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _explain(error: ValidationError, origin: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        if item["type"] == "extra_forbidden":
            valid = _valid_keys(Config)
            near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5) or [
                v for v in valid if v.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
            ]
            hint = f"; nearest valid key: {near[0]}" if near else ""
            lines.append(f"{key}: unknown key (value {item['input']!r}){hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            shown = "" if isinstance(item["input"], (dict, BaseModel)) else f" (got {item['input']!r})"
            lines.append(f"{key}: {message}{shown}")
    return f"{origin}: " + "\n  ".join(["the configuration cannot be used:"] + lines)


def load_config(path: str | os.PathLike | None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a YAML file (None for defaults only), applies `key.sub=value` overrides and validates.

    Raises:
        ConfigError: the file is missing or not YAML, or a key, type or combination is wrong.
    """
    tree: dict = {}
    origin = "defaults" if path is None else str(path)
    if path is not None:
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
        tree = _parse_yaml(text, str(path)) or {}
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: expected a mapping of keys, got {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    return validate(tree, origin)


def validate(tree: dict, origin: str = "configuration") -> Config:
    """Validates a plain mapping; raises `ConfigError`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def dump(config: BaseModel) -> str:
    """The fully resolved configuration as YAML; `load_config` of it gives an equal one."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, width=100)
