"""cli/durable.py: what a job's start finds below --save, and what it says of it."""

import pytest
from durable_parts import write_generation
from test_checks import launch

from megatron.hotswap.cli.durable import describe, durable_of
from megatron.hotswap.cli.launch import prepare
from megatron.hotswap.errors import UsageError
from megatron.hotswap.snapshot import durable, manifest

SHAPE = {"context_parallel_size": 1, "expert_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2}


def save_with(tmp_path, *generations, tracker=None, **shape):
    root = tmp_path / "save" / manifest.FOLDER
    for generation in generations:
        write_generation(root, generation, ranks=4, **{**SHAPE, **shape})
    (tmp_path / "save").mkdir(exist_ok=True)
    if tracker is not None:
        (tmp_path / "save/latest_checkpointed_iteration.txt").write_text(str(tracker))
    return root


def flags(tmp_path, more=""):
    return f"--tensor-model-parallel-size 2 --save {tmp_path}/save {more}"


def control(tmp_path, more=""):
    return prepare(launch(tmp_path, flags(tmp_path, more)))


def test_the_newest_generations_are_what_the_job_begins_from(tmp_path):
    root = save_with(tmp_path, 30, 40, tracker=20)
    begun = control(tmp_path, f"--load {tmp_path}/save --hot-swap-keep-durable 5").durable
    assert [x.generation for x in begun.begin] == [40, 30]
    assert (begun.root, begun.keep, begun.shape["world-size"]) == (str(root), 5, 4)
    assert "goes on from durable generation 40 of run run-1" in "".join(describe(begun))
    assert "the newest 5 are kept" in describe(begun)[0]


def test_megatrons_checkpoint_goes_first_where_it_is_as_new(tmp_path):
    save_with(tmp_path, 30, 40, tracker=40)
    assert control(tmp_path, f"--load {tmp_path}/save").durable.begin == ()


def test_a_base_model_that_is_finetuned_says_nothing_of_this_jobs_steps(tmp_path):
    save_with(tmp_path, 40)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/latest_checkpointed_iteration.txt").write_text("9000")
    assert [x.generation for x in control(tmp_path, f"--load {tmp_path}/base --finetune").durable.begin] == [40]


@pytest.mark.parametrize(
    ("more", "there"),
    [
        ("--load {save} --save-interval 10", True),
        ("--load {save}/../save --save-interval 10", True),
        ("--load {save}", False),
        ("--save-interval 10", False),
        ("--load {save}/../base --save-interval 10", False),
        ("--load {save} --save-interval 10 --finetune", False),
    ],
)
def test_a_command_that_loads_where_it_saves_goes_on_from_megatrons_checkpoints(tmp_path, more, there):
    save_with(tmp_path, tracker=20)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/latest_checkpointed_iteration.txt").write_text("9")
    begun = control(tmp_path, more.format(save=tmp_path / "save")).durable
    assert begun.checkpoints == (str(tmp_path / "save") if there else "")
    assert ("ends with code 1; with --save-interval and --load DIR" in "".join(describe(begun))) is not there


def test_without_save_there_is_nowhere_to_write_and_that_is_said(tmp_path):
    assert prepare(launch(tmp_path)).durable is None
    assert "has nowhere to write" in describe(None)[0]


def test_another_grid_is_refused_before_anything_starts(tmp_path):
    save_with(tmp_path, 40, tensor_model_parallel_size=4)
    with pytest.raises(UsageError, match=r"--tensor-model-parallel-size was 4 and is 2.*start once on the old grid"):
        control(tmp_path)


def test_a_damaged_manifest_is_said_and_the_older_generation_taken(tmp_path):
    root = save_with(tmp_path, 30, 40)
    newest = sorted(root.iterdir())[-1]
    (newest / manifest.MANIFEST).write_text("{}")
    begun = control(tmp_path).durable
    assert [x.generation for x in begun.begin] == [30]
    assert "cannot be used" in describe(begun)[2] and newest.name in describe(begun)[2]
    (sorted(root.iterdir())[0] / manifest.MANIFEST).write_text("{}")
    with pytest.raises(UsageError, match="a durable generation is damaged, and there is no other"):
        control(tmp_path)


def test_what_a_reused_folder_has_of_an_earlier_training_does_not_come_back(tmp_path):
    """A finished job's generation, and a new job that begins anew in the same --save: its restart must not take the old one up."""
    root = save_with(tmp_path, 80, tracker=100)
    assert control(tmp_path).durable.begin == ()
    (tmp_path / "save/latest_checkpointed_iteration.txt").write_text("10")  # the new job's own
    assert control(tmp_path).durable.begin == ()
    assert durable.find(root) == ([], [], []) and len(list(root.iterdir())) == 1


def test_a_save_that_cannot_be_read_is_refused_in_words(tmp_path):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / manifest.FOLDER).symlink_to(tmp_path / "save" / manifest.FOLDER)
    with pytest.raises(UsageError, match="cannot be read"):
        durable_of(flags(tmp_path).split(), 4, 2)
