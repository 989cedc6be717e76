"""The network against the published architecture: names, shapes, sizes and an independent forward pass."""

import math

import pytest
import torch
import torch.nn.functional as F

from vr_online.config import ModelConfig
from vr_online.errors import UserError
from vr_online.models.sit import SiT, Size, build_sit, drop_labels, forward_macs, model_size, sincos_positions, time_features

TINY = Size(depth=2, hidden_size=32, num_heads=4, patch_size=2)


def published_shapes(depth, width, patch, channels, tokens, classes, learn_sigma=True):
    """Every tensor of an official SiT checkpoint, from the architecture's description."""
    outputs = patch * patch * channels * (2 if learn_sigma else 1)
    shapes = {
        "pos_embed": (1, tokens, width),
        "x_embedder.proj.weight": (width, channels, patch, patch),
        "x_embedder.proj.bias": (width,),
        "y_embedder.embedding_table.weight": (classes + 1, width),
    }

    def linear(name, d_in, d_out):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (d_out, d_in), (d_out,)

    linear("t_embedder.mlp.0", 256, width)
    linear("t_embedder.mlp.2", width, width)
    for i in range(depth):
        linear(f"blocks.{i}.attn.qkv", width, 3 * width)
        linear(f"blocks.{i}.attn.proj", width, width)
        linear(f"blocks.{i}.mlp.fc1", width, 4 * width)
        linear(f"blocks.{i}.mlp.fc2", 4 * width, width)
        linear(f"blocks.{i}.adaLN_modulation.1", width, 6 * width)
    linear("final_layer.linear", width, outputs)
    linear("final_layer.adaLN_modulation.1", width, 2 * width)
    return shapes


def published_forward(state, x, t, y, depth, heads, patch):
    """SiT's forward as a plain function of a checkpoint's tensors, written from the paper's description."""

    def linear(name, h):
        return h @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(h):
        centred = h - h.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def condition(name, parts):
        return [part.unsqueeze(1) for part in linear(name, c * torch.sigmoid(c)).chunk(parts, dim=-1)]

    def attention(h):
        q, k, v = linear(f"blocks.{i}.attn.qkv", h).split(width, dim=-1)
        heads_out = []
        for s in range(0, width, width // heads):
            part = slice(s, s + width // heads)
            logits = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width // heads)
            heads_out.append(logits.softmax(-1) @ v[..., part])
        return linear(f"blocks.{i}.attn.proj", torch.cat(heads_out, dim=-1))

    def gelu(h):
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))

    batch, channels, rows, columns = x.shape
    width = state["x_embedder.proj.bias"].numel()
    patches = F.unfold(x, patch, stride=patch).transpose(1, 2)
    h = patches @ state["x_embedder.proj.weight"].flatten(1).T + state["x_embedder.proj.bias"] + state["pos_embed"]
    angles = t[:, None] * 10000.0 ** (-torch.arange(128, dtype=t.dtype) / 128)
    e = linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], dim=1))
    c = linear("t_embedder.mlp.2", e * torch.sigmoid(e)) + state["y_embedder.embedding_table.weight"][y]
    for i in range(depth):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = condition(f"blocks.{i}.adaLN_modulation.1", 6)
        h = h + gate_a * attention(norm(h) * (1 + scale_a) + shift_a)
        inner = gelu(linear(f"blocks.{i}.mlp.fc1", norm(h) * (1 + scale_m) + shift_m))
        h = h + gate_m * linear(f"blocks.{i}.mlp.fc2", inner)
    shift, scale = condition("final_layer.adaLN_modulation.1", 2)
    out = linear("final_layer.linear", norm(h) * (1 + scale) + shift)
    outputs = out.shape[-1] // patch**2
    image = torch.zeros(batch, outputs, rows, columns, dtype=x.dtype)
    for n in range(out.shape[1]):  # token n covers one patch; within it channels vary fastest
        r, q = divmod(n, columns // patch)
        cell = out[:, n].view(batch, patch, patch, outputs).permute(0, 3, 1, 2)
        image[:, :, r * patch : (r + 1) * patch, q * patch : (q + 1) * patch] = cell
    return image


def randomise(model, seed=0):
    """Weights without the zeros of adaLN-Zero, so that every layer matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.5 / math.sqrt(p.shape[-1])))
    return model


def inputs(latent_shape, batch=3, classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, *latent_shape, generator=generator)
    return x, torch.rand(batch, generator=generator), torch.tensor([0, classes // 2, classes][:batch])


@pytest.mark.parametrize("letters,depth,width,heads,millions", [
    ("S", 12, 384, 6, 33), ("B", 12, 768, 12, 130), ("L", 24, 1024, 16, 458), ("XL", 28, 1152, 16, 675),
])  # fmt: skip
@pytest.mark.parametrize("patch", [1, 2, 4, 8])
def test_names_shapes_and_parameter_counts_are_the_published_ones(letters, depth, width, heads, millions, patch):
    config = ModelConfig(name=f"SiT-{letters}/{patch}", learn_sigma=True)
    with torch.device("meta"):
        model = build_sit(config, (4, 32, 32), 1000)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == published_shapes(depth, width, patch, 4, (32 // patch) ** 2, 1000)
    assert model_size(config).num_heads == model.blocks[0].attn.num_heads == heads
    if patch == 2:
        assert int(sum(value.numel() for value in model.state_dict().values()) / 1e6 + 0.5) in (millions, millions + 1)


@pytest.mark.parametrize("letters,gmacs", [("S", 6.06), ("B", 23.0), ("L", 80.7), ("XL", 118.6)])
def test_macs_are_the_published_ones(letters, gmacs):
    macs = forward_macs(ModelConfig(name=f"SiT-{letters}/2", learn_sigma=True), (4, 32, 32))
    assert macs / 1e9 == pytest.approx(gmacs, rel=1e-3)


def test_macs_agree_with_torchs_flop_counter():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(name="custom", depth=2, hidden_size=48, num_heads=3, patch_size=2, num_classes=10)
    model = build_sit(config, (3, 8, 12))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused attention is not counted
        model(*inputs((3, 8, 12), batch=1))
    assert forward_macs(config, (3, 8, 12)) == pytest.approx(counter.get_total_flops() / 2, rel=1e-3)


@pytest.mark.parametrize("latent_shape", [(4, 8, 8), (3, 4, 12)])
@pytest.mark.parametrize("learn_sigma", [False, True])
def test_forward_is_the_published_function_of_the_state_dict(latent_shape, learn_sigma):
    model = randomise(SiT(TINY, latent_shape, 10, learn_sigma=learn_sigma)).double()
    x, t, y = inputs(latent_shape)
    expected = published_forward(model.state_dict(), x.double(), t.double(), y, depth=2, heads=4, patch=2)
    output = model(x, t, y)
    assert output.shape == (3, latent_shape[0] * (2 if learn_sigma else 1), *latent_shape[1:])
    assert expected.std() > 0.05
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5)  # t's sinusoids are float32


def test_positions_follow_the_published_layout():
    """Column first, then row; each sin then cos of position / 10000^(2 k / (D / 2))."""
    table = sincos_positions(8, 2, 3)[0]
    for n in range(6):
        row, column = divmod(n, 3)
        expected = [f(p / 10000 ** (k / 2)) for p in (column, row) for f in (math.sin, math.cos) for k in range(2)]
        torch.testing.assert_close(table[n], torch.tensor(expected))


def test_a_new_model_outputs_zero_and_its_blocks_are_the_identity():
    model = SiT(TINY, (4, 8, 8), 10)
    assert (model(*inputs((4, 8, 8))) == 0).all()
    h = torch.randn(2, 16, 32)
    assert torch.equal(model.blocks[0](h, torch.randn(2, 32)), h)


def test_initial_weights_are_a_function_of_the_seed():
    def build(seed):
        torch.manual_seed(seed)
        return SiT(TINY, (4, 8, 8), 10).state_dict()

    first, again, other = build(1), build(1), build(2)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def gradients(model):
    model.zero_grad()
    x, t, y = inputs((4, 8, 8))
    model(x, t, y).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_recomputed_activations_give_the_same_gradients():
    plain = randomise(SiT(TINY, (4, 8, 8), 10))
    recomputed = SiT(TINY, (4, 8, 8), 10, checkpoint_activations=True)
    recomputed.load_state_dict(plain.state_dict())
    first, second = gradients(plain), gradients(recomputed)
    assert first and all(torch.equal(first[k], second[k]) for k in first)


def test_checkpointing_keeps_fewer_activations():
    def saved(flag):
        count = 0

        def pack(tensor):
            nonlocal count
            count += tensor.numel()
            return tensor

        model = randomise(SiT(Size(6, 32, 4, 2), (4, 8, 8), 10, checkpoint_activations=flag))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(*inputs((4, 8, 8)))
        return count

    assert saved(True) < 0.5 * saved(False)


def test_compiling_changes_neither_names_nor_results():
    config = ModelConfig(name="custom", depth=1, hidden_size=16, num_heads=2, patch_size=2, num_classes=10)
    plain = randomise(build_sit(config, (4, 4, 4)))
    compiled = build_sit(config, (4, 4, 4))
    compiled.load_state_dict(plain.state_dict())
    for block in compiled.blocks:
        block.compile(backend="eager")
    assert list(compiled.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(compiled(*inputs((4, 4, 4))), plain(*inputs((4, 4, 4))))


def test_the_compile_switch_compiles_every_block():
    config = ModelConfig(name="custom", depth=2, hidden_size=16, num_heads=2, patch_size=2, num_classes=10, compile=True)
    assert all(block._compiled_call_impl is not None for block in build_sit(config, (4, 4, 4)).blocks)


def test_time_features_are_float32_in_a_bf16_model():
    model = randomise(SiT(TINY, (4, 8, 8), 10)).bfloat16()
    x, t, y = inputs((4, 8, 8))
    seen = []
    model.t_embedder.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert model(x, t, y).dtype == torch.bfloat16
    torch.testing.assert_close(seen[0], time_features(t).bfloat16(), rtol=0, atol=0)
    # Two times that bf16 itself cannot tell apart.
    assert not torch.equal(time_features(torch.tensor([0.9, 0.901]))[0], time_features(torch.tensor([0.9, 0.901]))[1])


def test_labels_are_dropped_one_by_one_at_the_asked_for_rate():
    y = torch.arange(20_000) % 10
    dropped = drop_labels(y, 0.1, 10, torch.Generator().manual_seed(0))
    null = dropped == 10
    assert abs(float(null.float().mean()) - 0.1) < 4 * math.sqrt(0.1 * 0.9 / len(y))
    assert torch.equal(dropped[~null], y[~null])
    assert torch.equal(drop_labels(y, 0.0, 10), y) and (drop_labels(y, 1.0, 10) == 10).all()
    assert torch.equal(dropped, drop_labels(y, 0.1, 10, torch.Generator().manual_seed(0)))


def test_impossible_sizes_are_refused():
    with pytest.raises(UserError, match="patch size 2 does not divide the latent 7 x 8"):
        SiT(TINY, (4, 7, 8), 10)
    with pytest.raises(UserError, match="model.num_classes"):
        build_sit(ModelConfig(name="SiT-S/8"), (4, 8, 8))
    with pytest.raises(UserError, match="model.num_classes: 5 is less than the 10"):
        build_sit(ModelConfig(name="SiT-S/8", num_classes=5), (4, 8, 8), 10)
