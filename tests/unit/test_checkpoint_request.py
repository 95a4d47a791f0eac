"""A checkpoint that is asked for with a file."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from checkpoint_request import FILE_NAME, CheckpointRequest


@pytest.fixture
def trainer(tmp_path):
    """What verl's trainer shows of itself."""
    config = OmegaConf.create({"trainer": {"save_freq": 10, "default_local_dir": str(tmp_path)}})
    return SimpleNamespace(config=config)


def test_without_a_request_the_schedule_stays(trainer):
    CheckpointRequest().look(trainer, step=3)
    assert trainer.config.trainer.save_freq == 10


def test_a_request_saves_the_running_step_alone(trainer, tmp_path):
    request = CheckpointRequest()
    (tmp_path / FILE_NAME).touch()
    request.look(trainer, step=3)
    assert trainer.config.trainer.save_freq == 1
    assert not (tmp_path / FILE_NAME).exists()
    request.look(trainer, step=3)  # an asynchronous trainer draws several batches a step
    assert trainer.config.trainer.save_freq == 1
    request.look(trainer, step=4)
    assert trainer.config.trainer.save_freq == 10


def test_two_requests_in_a_row_keep_the_schedule(trainer, tmp_path):
    request = CheckpointRequest()
    for step in (3, 3, 4):
        (tmp_path / FILE_NAME).touch()
        request.look(trainer, step)
        assert trainer.config.trainer.save_freq == 1
    request.look(trainer, step=5)
    assert trainer.config.trainer.save_freq == 10


def test_a_request_that_cannot_be_taken_is_said_and_costs_nothing(trainer, tmp_path, caplog):
    (tmp_path / FILE_NAME).mkdir()
    CheckpointRequest().look(trainer, step=3)
    assert trainer.config.trainer.save_freq == 10
    assert "can't be taken" in caplog.text


def test_a_trainer_without_a_config_is_left_alone():
    CheckpointRequest().look(None, step=3)
