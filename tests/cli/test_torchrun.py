"""Under torchrun, fairseq-train is one training: on one machine and on several, resumed too."""

import subprocess

import pytest
import torch


@pytest.fixture(scope="module")
def single(shared_directory, once, train, log_of):
    """What one process logs that sums the gradients of two batches: six updates."""

    def make(directory):
        (directory / "log").write_text(train(directory, "--update-freq", 2, "--max-update", 6))

    return log_of((once(shared_directory / "single", make) / "log").read_text(), "train_inner")


def assert_one_training(output, expected, log_of):
    """Independent trainings fail here: each has half the words a batch, twice the updates an epoch, other losses."""
    assert "training on 2 devices" in output
    log = log_of(output, "train_inner")
    for name in ("num_updates", "epoch", "wpb", "bsz"):
        assert [line[name] for line in log] == [line[name] for line in expected]
    for name in ("loss", "gnorm"):
        assert [line[name] for line in log] == pytest.approx([line[name] for line in expected], abs=1.01e-3)


def test_two_processes_train_one_model_and_resume_it(single, options, tmp_path, torchrun, log_of):
    command = ("fairseq-train", *options(tmp_path), "--distributed-backend", "gloo")
    assert_one_training(torchrun(*command, "--max-update", 3), single[:3], log_of)
    resumed = torchrun(*command, "--max-update", 6)
    assert "checkpoint_last.pt (epoch 1 @ 3 updates)" in resumed
    assert_one_training(resumed, single[3:], log_of)


def test_two_machines_with_one_process_each_train_one_model(
    single, options, tmp_path, free_port, command, environment, log_of
):
    rendezvous = ("--nnodes", 2, "--nproc_per_node", 1, "--master_addr", "localhost", "--master_port", free_port)
    machines = []
    for rank in range(2):
        training = (command("fairseq-train")[0], *options(tmp_path / str(rank)), "--max-update", 3)
        line = command("torchrun", *rendezvous, "--node_rank", rank, *training, "--distributed-backend", "gloo")
        machines.append(
            subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [machine.communicate(timeout=180)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert_one_training(outputs[0], single[:3], log_of)
    assert not (tmp_path / "1/checkpoint_last.pt").exists()


@pytest.fixture
def joined(plugin, monkeypatch):
    """``joined(gpus, **options)``: the distributed configuration of process 5 of 8, the second on its machine."""
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.distributed import utils
    from omegaconf import OmegaConf

    variables = {"WORLD_SIZE": 8, "RANK": 5, "LOCAL_RANK": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(utils, "distributed_main", lambda device, main, cfg, kwargs: None)

    def join(gpus, cpu=False, **given):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        cfg = OmegaConf.structured(FairseqConfig)
        cfg.common.cpu = cpu
        for name, value in given.items():
            cfg.distributed_training[name] = value
        utils.call_main(cfg, lambda cfg: None)
        return cfg.distributed_training

    return join


def test_each_process_takes_the_gpu_of_its_number_on_the_machine(joined):
    cfg = joined(gpus=4)
    assert (cfg.distributed_world_size, cfg.distributed_rank, cfg.device_id) == (8, 5, 1)
    assert cfg.distributed_init_method == "env://"
    assert cfg.distributed_no_spawn


def test_an_init_method_of_the_user_is_left_alone(joined):
    cfg = joined(gpus=4, distributed_init_method="tcp://elsewhere:1", distributed_no_spawn=True)
    assert (cfg.distributed_init_method, cfg.distributed_rank) == ("tcp://elsewhere:1", 0)


def test_more_processes_than_gpus_are_refused(joined):
    with pytest.raises(ValueError, match="has 1 GPUs: give --nproc_per_node 1"):
        joined(gpus=1)


@pytest.mark.parametrize(("gpus", "cpu"), [(0, False), (0, True), (4, True)])
def test_nccl_on_the_cpu_is_refused(joined, gpus, cpu):
    with pytest.raises(ValueError, match="add --cpu --distributed-backend gloo"):
        joined(gpus=gpus, cpu=cpu)
