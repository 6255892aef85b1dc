"""Tiny LeRobot policies with random weights, saved by their own save_pretrained; nothing comes from a hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from lerobot.policies.pi0 import modeling_pi0, processor_pi0
from lerobot.policies.pi05 import modeling_pi05, processor_pi05
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from specact.lab.data.episodes import Episodes
from specact.lab.data.lerobot_writing import finish, write_part

STATE, ACTIONS, SIDE, CHUNK, WIDTH = 4, 2, 24, 6, 5
_WORDS = ("<pad>", "<unk>", "<fake>", "<global>", "<image>", "<end>", "push", "the", "block", "lift")
_IMAGE_TOKEN = _WORDS.index("<image>")
FRONT = "observation.images.front"


def stats(state: int, camera: str) -> dict[str, dict[str, torch.Tensor]]:
    """The middle of every range is not 0 and no two scales are alike, so that a wrong one shows."""
    made = {
        "observation.state": {"mean": torch.arange(state) / 4.0, "std": torch.arange(state) / 2.0 + 0.5},
        camera: {"mean": torch.full((3, 1, 1), 0.4), "std": torch.full((3, 1, 1), 0.2)},
        "action": {"mean": torch.tensor([0.5, -1.0]), "std": torch.tensor([0.2, 2.0])},
    }
    for statistics in made.values():
        for names, scales in ((("min", "max"), 9.0), (("q01", "q99"), 2.0)):
            for name, side in zip(names, (-1.0, 1.0), strict=True):
                statistics[name] = statistics["mean"] + side * scales * statistics["std"]
    return made


def save(
    kind: str, path: Path, seed: int = 0, *, state: int = STATE, camera: str = FRONT, side: int = SIDE, **settings: Any
) -> Path:
    """Writes a policy of this type with its processors."""
    torch.manual_seed(seed)
    inputs = {
        "observation.state": PolicyFeature(FeatureType.STATE, (state,)),
        camera: PolicyFeature(FeatureType.VISUAL, (3, side, side)),
    }
    outputs = {"action": PolicyFeature(FeatureType.ACTION, (ACTIONS,))}
    config = make_policy_config(kind, input_features=inputs, output_features=outputs, device="cpu", **settings)
    policy = get_policy_class(kind)(config)
    for parameter in policy.parameters():  # some begin as zeros, behind which nothing would be seen
        with torch.no_grad():
            parameter += 0.05 * torch.randn_like(parameter)
    policy.save_pretrained(path)
    for processor in make_pre_post_processors(config, dataset_stats=stats(state, camera)):
        processor.save_pretrained(path)
    return path


def act(path: Path, **settings: Any) -> Path:
    """ACT: one pass, nothing drawn."""
    return save(
        "act", path, chunk_size=CHUNK, n_action_steps=CHUNK, dim_model=16, n_heads=2, dim_feedforward=16,
        n_encoder_layers=1, n_vae_encoder_layers=1, latent_dim=4, pretrained_backbone_weights=None, **settings,
    )  # fmt: skip


def diffusion(path: Path, **settings: Any) -> Path:
    """A diffusion policy that looks at two observations and draws in every step."""
    return save(
        "diffusion", path, horizon=8, n_action_steps=CHUNK, down_dims=(8, 16), n_groups=4, num_train_timesteps=4,
        diffusion_step_embed_dim=8, spatial_softmax_num_keypoints=4, pretrained_backbone_weights=None,
        use_group_norm=True, **settings,
    )  # fmt: skip


def vqbet(path: Path) -> Path:
    """VQ-BeT, which draws codes and looks at three observations."""
    return save(
        "vqbet", path, n_obs_steps=3, n_action_pred_token=2, action_chunk_size=CHUNK, crop_shape=(20, 20),
        spatial_softmax_num_keypoints=4, pretrained_backbone_weights=None, vqvae_n_embed=4, vqvae_embedding_dim=8,
        vqvae_enc_hidden_dim=16, gpt_input_dim=16, gpt_output_dim=16, gpt_n_layer=1, gpt_n_head=2, gpt_hidden_dim=16,
        bet_softmax_temperature=5.0, use_group_norm=True,
    )  # fmt: skip


def smolvla(path: Path, **settings: Any) -> Path:
    """SmolVLA. What it asks the hub for is beside it, as it takes a folder for the name of its backbone."""
    backbone = path.with_name(path.name + "-backbone")
    image, video = SmolVLMImageProcessor(), SmolVLMVideoProcessor()
    SmolVLMProcessor(image, _tokenizer(), video, chat_template="-").save_pretrained(backbone)
    text: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(_WORDS), "pad_token_id": 0,
    }  # fmt: skip
    seeing = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    SmolVLMConfig(
        text_config=text, vision_config=seeing, scale_factor=2, image_token_id=_IMAGE_TOKEN, pad_token_id=0
    ).save_pretrained(backbone)
    return save(
        "smolvla", path, chunk_size=CHUNK, n_action_steps=CHUNK, max_action_dim=WIDTH, max_state_dim=WIDTH,
        vlm_model_name=str(backbone), num_vlm_layers=2, resize_imgs_with_padding=(32, 32), empty_cameras=1, **settings,
    )  # fmt: skip


def taught_smolvla(path: Path, steps: int = 150) -> Path:
    """SmolVLA after some steps of its own training: it answers as :func:`demonstrations` shows."""
    smolvla(path)
    config = PreTrainedConfig.from_pretrained(path)
    policy = get_policy_class("smolvla").from_pretrained(path, config=config).train()
    before, _ = make_pre_post_processors(config, pretrained_path=str(path))
    optimizer = torch.optim.AdamW((parameter for parameter in policy.parameters() if parameter.requires_grad), lr=1e-2)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    for _ in range(steps):
        state, action = observed(32, rng)
        batch = {
            "observation.state": torch.tensor(state), FRONT: torch.rand(32, 3, SIDE, SIDE), "task": ["lift"] * 32,
            "action": torch.tensor(action)[:, None].repeat(1, CHUNK, 1),
        }  # fmt: skip
        loss, _ = policy.forward(before(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy.save_pretrained(path)
    return path


def observed(count: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """States, and the action that is right for each."""
    told, seen = stats(STATE, FRONT), rng.standard_normal((count, STATE), dtype=np.float32)
    mean, std = ({name: told[name][key].numpy() for name in told} for key in ("mean", "std"))
    right = np.stack([seen[:, 0], -seen[:, 1]], axis=1)
    return (
        mean["observation.state"] + std["observation.state"] * seen,
        mean["action"] + std["action"] * right,
    )  # fmt: skip


def demonstrations(folder: Path, episodes: int = 12, steps: int = 8, rate_hz: float = 20.0) -> Path:
    """A LeRobot dataset, v3.0, of a robot that stands where it is told to do one thing."""
    rng = np.random.default_rng(1)
    states, actions = observed(episodes, rng)
    for number in range(episodes):
        seen = {
            "state": np.repeat(states[number : number + 1], steps, axis=0),
            "image.front": rng.integers(0, 256, (steps, SIDE, SIDE, 3), np.uint8),
        }
        episode = Episodes(seen, np.repeat(actions[number : number + 1], steps, axis=0), np.array([steps]), rate_hz)
        write_part(folder, number, episode, ("push the block", "lift")[number % 2])
    finish(folder, episodes)
    return folder


def pi0(path: Path, kind: str = "pi0", **settings: Any) -> Path:
    """Pi0, whose sizes are in its code: load it within :func:`tiny_gemma` as well."""
    tokenizer = path.with_name(path.name + "-tokenizer")
    _tokenizer().save_pretrained(tokenizer)
    processing = {"pi0": processor_pi0, "pi05": processor_pi05}[kind]
    step = processing.TokenizerProcessorStep

    def local(tokenizer_name: str, **more: Any) -> Any:
        return step(tokenizer_name=str(tokenizer), **more)

    with tiny_gemma(), mock.patch.object(processing, "TokenizerProcessorStep", local):
        return save(
            kind, path, chunk_size=CHUNK, n_action_steps=CHUNK, max_action_dim=WIDTH, max_state_dim=WIDTH,
            image_resolution=(28, 28), tokenizer_max_length=12, **settings,
        )  # fmt: skip


def pi05(path: Path) -> Path:
    """Pi0.5, which reads its state as words."""
    return pi0(path, "pi05")


@contextmanager
def tiny_gemma() -> Iterator[None]:
    """While this lasts pi0 and pi0.5 are made with a width of 16."""
    real = modeling_pi0.PaliGemmaForConditionalGenerationWithPiGemma

    def sizes(variant: str) -> Any:
        return modeling_pi0.GemmaConfig(width=16, depth=2, mlp_dim=16, num_heads=8, num_kv_heads=1, head_dim=8)

    def made(config: Any) -> Any:
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        for name, value in {**small, "projection_dim": 16}.items():
            setattr(config.vision_config, name, value)
        return real(config)

    seams: dict[str, Any] = {"get_gemma_config": sizes, "PaliGemmaForConditionalGenerationWithPiGemma": made}
    with mock.patch.multiple(modeling_pi0, **seams), mock.patch.multiple(modeling_pi05, **seams):
        yield


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {
        "fake_image_token": "<fake>", "global_image_token": "<global>", "image_token": "<image>",
        "end_of_utterance_token": "<end>",
    }  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", extra_special_tokens=special
    )
