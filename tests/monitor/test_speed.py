import pytest
import torch

from vr_online.config import ModelConfig
from vr_online.models.sit import forward_macs
from vr_online.monitor import StepTimer, device_peak_tflops, memory_metrics, mfu, peak_tflops, training_flops

# Published multiply-accumulates of one forward pass at 4 x 32 x 32, and the training cost they imply.
PUBLISHED = {"S/2": (6.06e9, 36), "B/2": (23.0e9, 138), "L/2": (80.7e9, 484), "XL/2": (118.6e9, 712)}


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("name", PUBLISHED)
def test_training_flops_are_six_times_the_published_macs(name):
    macs, gflop = PUBLISHED[name]
    assert round(training_flops(macs) / 1e9) == pytest.approx(gflop, abs=0.5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_network_counts_the_published_macs(name):
    counted = forward_macs(ModelConfig(name=f"SiT-{name}", num_classes=1000), (4, 32, 32))
    assert counted == pytest.approx(PUBLISHED[name][0], rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_mfu_is_one_at_the_peak_and_inverts_to_images(name):
    macs, _ = PUBLISHED[name]
    at_peak = 8 * 312e12 / (6 * macs)
    assert mfu(macs, at_peak, devices=8, peak_tflops=312) == pytest.approx(1.0)
    assert mfu(macs, at_peak / 2, devices=4, peak_tflops=312) == pytest.approx(1.0)
    assert mfu(macs, at_peak / 4, devices=8, peak_tflops=312) == pytest.approx(0.25)


def test_mfu_of_a_known_rate():
    # 107 images/s of XL/2 on one A100: 107 * 6 * 118.6e9 / 312e12.
    assert mfu(118.6e9, 107, 1, peak_tflops("NVIDIA A100-SXM4-80GB", "bf16")) == pytest.approx(0.244, abs=0.001)


def test_mfu_refuses_nonsense():
    with pytest.raises(ValueError, match="devices 0"):
        mfu(1e9, 1.0, 0, 312)
    with pytest.raises(ValueError, match="peak_tflops 0"):
        mfu(1e9, 1.0, 1, 0)


@pytest.mark.parametrize(
    "device, bf16",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
        ("AMD Instinct MI250X", 191),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A1000", None),
        ("NVIDIA T400 4GB", None),
        ("Some Unheard-of Card", None),
    ],
)
def test_peak_is_found_by_the_name_torch_gives(device, bf16):
    assert peak_tflops(device, "bf16") == bf16


def test_precisions_have_their_own_peaks():
    name = "NVIDIA A100-SXM4-40GB"
    assert peak_tflops(name, "bf16") > peak_tflops(name, "fp32", tf32=True) > peak_tflops(name, "fp32")


def test_cpu_has_no_peak():
    assert device_peak_tflops("cpu", "fp32") is None


def test_timer_separates_steps_waits_and_pauses():
    clock = FakeClock()
    timer = StepTimer("cpu", batch_size=64, clock=clock)
    for _ in range(4):
        with timer.wait():
            clock.now += 0.25
        clock.now += 0.75
        timer.step()
    with timer.pause():
        clock.now += 1000
    assert timer.summary() == pytest.approx(
        {"speed/step_s": 1.0, "speed/images_per_s": 64.0, "speed/wait_share": 0.25}
    )


def test_timer_starts_anew_after_a_summary():
    clock = FakeClock()
    timer = StepTimer("cpu", batch_size=10, clock=clock)
    with timer.wait():
        clock.now += 5
    timer.step()
    timer.summary()
    clock.now += 2
    timer.step()
    assert timer.summary() == pytest.approx(
        {"speed/step_s": 2.0, "speed/images_per_s": 5.0, "speed/wait_share": 0.0}
    )
    assert timer.summary() == {}


def test_a_failed_pause_is_still_left_out():
    clock = FakeClock()
    timer = StepTimer("cpu", batch_size=1, clock=clock)
    with pytest.raises(RuntimeError), timer.pause():
        clock.now += 50
        raise RuntimeError
    clock.now += 1
    timer.step()
    assert timer.summary()["speed/step_s"] == pytest.approx(1.0)


def test_memory_covers_what_the_process_holds():
    held = torch.ones(40 * 2**20 // 4)  # 40 MiB, touched
    assert memory_metrics("cpu")["memory/host_peak_gib"] > held.nbytes / 2**30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_wait_counts_only_the_time_the_device_stood_still():
    import time

    timer = StepTimer("cuda", batch_size=1)
    a = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    timer.summary()
    for _ in range(5):  # the host waits while the device still works: no loss
        for _ in range(40):
            a @ a
        with timer.wait():
            time.sleep(0.001)
        timer.step()
    busy = timer.summary()["speed/wait_share"]
    for _ in range(5):
        torch.cuda.synchronize()
        with timer.wait():
            time.sleep(0.2)
        a @ a
        timer.step()
    starved = timer.summary()["speed/wait_share"]
    assert busy < 0.1 < 0.5 < starved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_pause_leaves_out_what_happens_inside_and_not_the_steps_queued_before():
    import time

    a = torch.randn(8192, 8192, device="cuda")
    timer = StepTimer("cuda", batch_size=1)

    def steps(paused):
        torch.cuda.synchronize()
        timer.step()
        timer.summary()
        for _ in range(5):
            for _ in range(20):
                a @ a
            timer.step()
            with timer.pause():
                if paused:
                    torch.cuda.synchronize()
                    time.sleep(0.3)
        return timer.summary()["speed/step_s"]

    steps(False)  # warm-up
    assert steps(True) == pytest.approx(steps(False), rel=0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory_is_the_peak():
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del x
    assert memory_metrics("cuda")["memory/device_peak_gib"] >= 0.25
