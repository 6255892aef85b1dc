"""A stopped run that goes on ends with the bytes of a run that was never stopped."""

import errno
import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.children import wait_for
from tests.tiny import KilledError, kill_at, quiet

from specact import load_pair
from specact.bundle.bundle import HEAD, give_head
from specact.errors import ConfigError, SpecactError
from specact.lab.train import loop
from specact.lab.train.recipe import ChunkRecipe, CodesRecipe, PolicyRecipe, TokenizerRecipe, load_recipe
from specact.lab.train.train import train as train_every

train = functools.partial(train_every, every=10)  # steps between checkpoints

POLICY = PolicyRecipe(
    layers=1, heads=2, width=8, head_width=0, dropout=0.2, steps=30, batch=16, warmup=3, average=0.9, bfloat16=False
)
# Everything random is on: dropout, observation noise, sampled offsets, revived codes, a snapshot.
RECIPE = CodesRecipe(
    env="ball", generate_episodes=5, generate_noise=0.3, window=2, chunk=2,
    tokenizer=TokenizerRecipe(codes=16, latent=4, hidden=8, steps=130, batch=64, dead_share=0.05),
    policies={
        "target": structs.replace(POLICY, offset_on="sampled", state_noise=0.1, snapshot=0.5),
        "draft": structs.replace(POLICY, width=32, sequential=True, bfloat16=True),
    },
)  # fmt: skip
ORDER = ("tokenizer", "target", "draft")


def reach(stage: str, whole: Path, out: Path) -> Path:
    """A run stopped just before a stage, from one never stopped: what is finished need not be trained again."""
    done = ORDER[: ORDER.index(stage)]
    out.mkdir()
    for path in [whole / "recipe.json", *(path for name in done for path in whole.glob(f"{name}*.safetensors"))]:
        shutil.copy(path, out)
    lines = (whole / "log.jsonl").read_text().splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(line for line in lines if json.loads(line)["stage"] in done))
    return out


def stop_in_target(whole: Path, out: Path) -> Path:
    """A run stopped in the target's stage, after a checkpoint."""
    with pytest.raises(KilledError):
        train(RECIPE, Path(), reach("target", whole, out), kill_at("target", 12))
    return out


def result(folder: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Weights, and the log without times."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    weights = {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}
    return weights, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(RECIPE, Path(), folder, quiet)
    return folder


@pytest.mark.parametrize("processor", ["AVX512", "AVX2"])
def test_bfloat16_is_used_only_where_it_is_faster(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    numbers = torch.ones(2, 2)
    for width, request in ((28, True), (32, True), (32, False)):
        used = torch.bfloat16 if processor == "AVX512" and width == 32 and request else torch.float32
        with loop.autocast(width, request, torch.device("cpu")):
            assert (numbers @ numbers).dtype == used


# --- stages side by side ---


def side_by_side(recipe: CodesRecipe, out: Path, progress: Callable[[str, int, int], None]) -> None:
    """With two stages at a time; no process may be left, however it ends."""
    try:
        train(recipe, Path(), out, progress, jobs=2)
    finally:
        assert multiprocessing.active_children() == []


def test_stages_side_by_side_end_like_one_after_the_other(never_stopped: Path, tmp_path: Path) -> None:
    out, most = reach("target", never_stopped, tmp_path / "run"), 0

    def progress(name: str, done: int, total: int) -> None:
        nonlocal most
        most = max(most, len(multiprocessing.active_children()))

    side_by_side(RECIPE, out, progress)
    assert most == 2
    assert result(out) == result(never_stopped)


def test_a_stage_that_fails_beside_another_is_named_and_both_go_on_later(never_stopped: Path, tmp_path: Path) -> None:
    out = stop_in_target(never_stopped, tmp_path / "run")
    (out / "draft.checkpoint").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"draft\.checkpoint") as caught:
        side_by_side(RECIPE, out, quiet)
    assert "draft" in caught.value.__notes__[0]
    assert (out / "target.checkpoint").exists() or (out / "target.safetensors").exists()
    (out / "draft.checkpoint").unlink()
    side_by_side(RECIPE, out, quiet)
    assert result(out) == result(never_stopped)


LONG = structs.replace(
    RECIPE, policies={name: structs.replace(policy, steps=10**6) for name, policy in RECIPE.policies.items()}
)


def test_a_killed_process_ends_the_run_and_leaves_no_other(tmp_path: Path) -> None:
    def kill(name: str, done: int, total: int) -> None:
        for process in multiprocessing.active_children()[:1]:
            process.kill()

    with pytest.raises(SpecactError, match="--jobs 1"):
        side_by_side(LONG, tmp_path / "run", kill)


def test_an_interrupt_ends_the_command_and_its_stages(
    tiny_recipe: Path, tmp_path: Path, command: list[str], environment: dict[str, str]
) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(tiny_recipe.read_text().replace("steps = 300", "steps = 1000000").replace("steps = 60", ""))
    process = subprocess.Popen(
        [*command, "train", str(recipe), "--out", str(out), "--jobs", "2"], env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        while not all((out / f"{stage}.checkpoint").exists() for stage in ("target", "draft")):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT and not (out / ".lock").exists()
    assert "SIGINT" in said and "Traceback" not in said

    def left() -> bool:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 0)
            return True
        return False

    wait_for(lambda: not left(), "no process is left")


# --- whose folder it is ---


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "..", "", "a b"])
def test_names_in_a_recipe_do_not_lead_out_of_the_run(name: str) -> None:
    with pytest.raises(ConfigError, match=f"bundle .*{re.escape(repr(name))}"):
        structs.replace(RECIPE, bundles={name: ("target", "draft")})
    with pytest.raises(ConfigError, match=f"policy .*{re.escape(repr(name))}"):
        structs.replace(RECIPE, policies={**RECIPE.policies, name: POLICY})
    with pytest.raises(ConfigError, match=f"bundle .*{re.escape(repr(name))}"):
        ChunkRecipe(kind="flow", bundle=name, env="ball", generate_episodes=1)


def test_a_policy_may_be_added_and_nothing_finished_is_touched(never_stopped: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(never_stopped, tmp_path / "run"))
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    more = structs.replace(RECIPE, policies={**RECIPE.policies, "small": structs.replace(POLICY, width=4)})
    train(more, Path(), out, quiet)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert (out / "small.safetensors").exists()
    assert result(out)[1][:-3] == result(never_stopped)[1]
    # The folder now belongs to the larger recipe.
    with pytest.raises(ConfigError, match="another recipe"):
        train(structs.replace(more, policies={"small": POLICY}), Path(), out, quiet)


def test_a_head_stays_in_a_bundle_whose_policies_did_not_change(
    tiny_run: Path, tiny_recipe: Path, tmp_path: Path
) -> None:
    out, recipe = Path(shutil.copytree(tiny_run, tmp_path / "run")), load_recipe(tiny_recipe, CodesRecipe)
    bundle, head = out / "bundles" / "tiny", tmp_path / "head.onnx"
    head.write_bytes(b"trained for these policies")
    give_head(bundle, head, 9)
    train_every(recipe, Path(), out, quiet)
    assert (bundle / HEAD).read_bytes() == head.read_bytes()
    load_pair(bundle)  # it checks the head's fingerprint
    for file in (out / "draft.safetensors", out / "recipe.json"):
        file.unlink()
    shorter = structs.replace(recipe.policies["draft"], steps=5)
    train_every(structs.replace(recipe, policies={**recipe.policies, "draft": shorter}), Path(), out, quiet)
    assert not (bundle / HEAD).exists(), "it was trained for another draft"
    load_pair(bundle)


# --- disks and damaged files ---


def test_a_full_disk_leaves_the_last_checkpoint_and_a_torn_log_line_is_forgotten(
    never_stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stop_in_target(never_stopped, tmp_path / "run")
    before, flush = (out / "target.checkpoint").read_bytes(), os.fsync

    def full(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("target.checkpoint"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"target\.checkpoint.*No space left"):
            train(RECIPE, Path(), out, quiet)
    assert (out / "target.checkpoint").read_bytes() == before
    assert not list(out.glob("*.partial"))
    with (out / "log.jsonl").open("a") as file:
        file.write('{"stage": "target", "st')
    train(RECIPE, Path(), out, quiet)
    assert result(out) == result(never_stopped)


def test_damaged_files_are_named_and_a_deleted_one_is_made_anew(never_stopped: Path, tmp_path: Path) -> None:
    out = stop_in_target(never_stopped, tmp_path / "run")
    for name in ("recipe.json", "target.checkpoint", "tokenizer.safetensors"):
        file = out / name
        whole = file.read_bytes()
        for damage in (whole[:-10], b""):
            file.write_bytes(damage)
            with pytest.raises(ConfigError, match=re.escape(name)):
                train(RECIPE, Path(), out, quiet)
        file.write_bytes(whole)
    (out / "target.checkpoint").unlink()
    train(RECIPE, Path(), out, quiet)
    assert result(out) == result(never_stopped)
