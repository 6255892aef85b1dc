"""A bundle answers like the trained networks, and refuses to load when anything does not belong."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from safetensors.numpy import load_file, save_file

from specact import load_bundle
from specact.errors import BundleError, ConfigError, SpecactError
from specact.families.codes.bundle import PARTS, find_bundle
from specact.families.codes.network import OnnxPolicy
from specact.lab.data.generate import demonstrations
from specact.lab.envs import load_task
from specact.lab.train import checkpoint, export, stages
from specact.lab.train.export import PARITY, LastPosition, example_inputs
from specact.lab.train.recipe import load_recipe
from specact.lab.train.vqbet import VQBeT
from specact.observation import Window
from specact.runtime.manifest import fingerprint_of

Damage = Callable[[Path], Any]
MANIFEST = "manifest.json"


def rewrite(bundle: Path, **changes: Any) -> None:
    """Changes the manifest; a value of None removes the key."""
    file = bundle / "manifest.json"
    manifest = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))


def vouch(bundle: Path) -> None:
    """Makes the manifest's fingerprints those of the files as they are, as a careless tool might."""
    rewrite(bundle, fingerprints={part: fingerprint_of(bundle / file) for part, file in PARTS.items()})


def shorten(file: Path, size: int = 100) -> None:
    file.write_bytes(file.read_bytes()[:-size])


def cut_and_vouch(name: str) -> Damage:
    def damage(bundle: Path) -> None:
        shorten(bundle / name)
        vouch(bundle)

    return damage


def remove(name: str) -> Damage:
    return lambda bundle: (bundle / name).unlink()


def retype(**tensors: np.ndarray | None) -> Damage:
    """Changes tensors of the tokenizer, or takes them out; the fingerprints are adapted."""

    def damage(bundle: Path) -> None:
        file = bundle / PARTS["tokenizer"]
        changed = load_file(file) | tensors
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
        vouch(bundle)

    return damage


def nested(bundle: Path) -> None:
    (bundle / MANIFEST).write_text('{"format": ' + "[" * 100_000 + "]" * 100_000 + "}")


def folder_instead(bundle: Path) -> None:
    (bundle / "target.onnx").unlink()
    (bundle / "target.onnx").mkdir()


def endless(name: str) -> Damage:
    """A file of 4 TiB that takes no room on the disk."""

    def damage(bundle: Path) -> None:
        with (bundle / name).open("wb") as file:
            file.truncate(1 << 42)

    return damage


def instead(name: str, target: str) -> Damage:
    def damage(bundle: Path) -> None:
        (bundle / name).unlink()
        (bundle / name).symlink_to(target)

    return damage


def cut(name: str) -> Damage:
    return lambda bundle: shorten(bundle / name)


def edit_spec(**changes: Any) -> Damage:
    def damage(bundle: Path) -> None:
        rewrite(bundle, spec=json.loads((bundle / "manifest.json").read_text())["spec"] | changes)

    return damage


def edit_field(name: str, **changes: Any) -> Damage:
    """Changes what the draft says of one observation; without changes it is left out."""

    def damage(bundle: Path) -> None:
        spec = json.loads((bundle / "manifest.json").read_text())["spec"]
        fields = spec["draft"]["fields"]
        fields[name] |= changes
        if not changes:
            del fields[name]
        rewrite(bundle, spec=spec)

    return damage


REFUSED: dict[str, tuple[Damage, str]] = {
    **{f"no {file}": (remove(file), rf"has no {re.escape(file)}; copy the whole folder") for file in PARTS.values()},
    "no manifest": (lambda b: (b / "manifest.json").unlink(), r"is not a bundle: it has no manifest\.json; name"),
    **{
        f"{file} cut short": (cut(file), rf"{re.escape(file)} has fingerprint \w+.*copy the whole folder again")
        for file in PARTS.values()
    },
    "draft.onnx cut short, fingerprint adapted": (cut_and_vouch("draft.onnx"), r"draft\.onnx is not a readable ONNX"),
    "tokenizer cut short, fingerprint adapted": (
        cut_and_vouch("tokenizer.safetensors"),
        r"tokenizer\.safetensors is damaged.*copy the bundle again",
    ),
    "another draft": (
        lambda b: shutil.copy(b / "target.onnx", b / "draft.onnx"),
        r"draft\.onnx has fingerprint.*the draft is damaged or belongs to another bundle",
    ),
    "another format": (lambda b: rewrite(b, format=99), r"has format 99, this version .* reads 2; export it again"),
    "JSON cut short": (cut("manifest.json"), r"manifest\.json is not valid JSON.*copy the bundle again"),
    "not text": (lambda b: (b / "manifest.json").write_bytes(b"\xff\xfe\x00"), r"manifest\.json is not valid JSON"),
    "no spec": (lambda b: rewrite(b, spec=None), r"manifest\.json lacks spec; copy the bundle again"),
    "spec of another version": (edit_spec(colour=3), r"no usable spec.*export the bundle again"),
    "another window": (edit_field("state", history=3), r"draft\.onnx takes .* do not match"),
    "another number of codes": (edit_spec(codes=4), r"tokenizer\.safetensors holds no decoder table"),
    "another execute": (edit_spec(execute=3), r"execute must lie between 1 and chunk = 2"),
    "a goal less": (edit_field("goal"), r"draft\.onnx takes .* do not match"),
    "a sequential head more": (
        edit_spec(sequential=True),
        r"draft\.onnx gives 2 outputs, .* \(sequential: True\) says 3: .*export the bundle again",
    ),
    "another name": (lambda b: rewrite(b, name="../../elsewhere"), r"the name in .* must be 1 to 64 of the characters"),
    "a name that is none": (lambda b: rewrite(b, name=["tiny"]), r"the name in .* must be a text, but is \['tiny'\]"),
    "a number for an environment": (lambda b: rewrite(b, env=5), r"the env in .* must be a text, but is 5"),
    "a list for a kind": (lambda b: rewrite(b, kind=[]), r"the kind in .* must be a text, but is \[\]"),
    "a list for a spec": (lambda b: rewrite(b, spec=[1]), r"the spec in .* must be an object, but is \[1\]"),
    "a list for fingerprints": (lambda b: rewrite(b, fingerprints=["a"]), r"the fingerprints in .* must be an object"),
    "a number for a fingerprint": (
        lambda b: rewrite(b, fingerprints=dict.fromkeys(PARTS, 1)), r"the fingerprint of \w+ in .* must be a text"),
    "a list for gates": (lambda b: rewrite(b, gates=[1]), r"the gates in .* must be an object"),
    "a draft left out": (lambda b: rewrite(b, left_out=["draft"]), r'the left_out in .* must be \["target"\]'),
    "lists in lists": (nested, r"manifest\.json is not valid JSON.*copy the bundle again"),
    "a number of 5,000 digits": (
        lambda b: (b / MANIFEST).write_text('{"format": ' + "1" * 5000 + "}"), r"manifest\.json is not valid JSON"),
    "a folder for a target": (folder_instead, r"has no target\.onnx; copy the whole folder"),
    "a text for a window": (edit_field("state", history="2"), r"none of them above 1048576, got \(8,\) and '2'"),
    "a window of true": (edit_field("state", history=True), r"its history an integer .* and True"),
    "a window of 2^70": (edit_field("state", history=2**70), r"its history an integer .* and 1180591620717411303424"),
    "codebooks without bound": (edit_spec(codebooks=10**9), r"codebooks must be a whole number from 1 to 8192"),
    "a temperature of NaN": (edit_spec(temperature=math.nan), r"temperature must be positive and finite"),
    "an endless rate": (edit_spec(rate_hz=math.inf), r"rate_hz must be positive and finite"),
    "a text for a rate": (edit_spec(rate_hz="20"), r"rate_hz must be positive and finite, but its manifest says '20'"),
    "a rate of 400 digits": (edit_spec(rate_hz=10**400), r"rate_hz must be positive and finite"),
    "a rate nobody can wait for": (edit_spec(rate_hz=1e-300), r"rate_hz must be at least 0\.001 and at most 1000000"),
    **{
        f"an endless {file}": (endless(file), rf"{re.escape(file)} cannot be read: it is larger than \d+ bytes")
        for file in (MANIFEST, "draft.onnx", "tokenizer.safetensors", "gate.onnx")
    },
    "a device for a manifest": (instead(MANIFEST, "/dev/zero"), r"manifest\.json cannot be read: it is not a regular"),
    "a file that cannot be read": (
        instead("draft.onnx", "/proc/self/mem"), r"draft\.onnx cannot be read: .*; copy the whole folder again"),
    "another overlap": (edit_spec(overlap="sum"), r"overlap must be drop or average"),
    "no centre": (retype(centre=None), r"tokenizer\.safetensors holds no centre of 2 actions in float32"),
    "a centre of another robot": (retype(centre=np.zeros(3, np.float32)), r"holds no centre of 2 actions in float32"),
    "a scale of whole numbers": (retype(scale=np.ones(2, np.int64)), r"holds no scale of 2 actions in float32"),
    "a table of whole numbers": (retype(table=np.ones((64, 2, 2), np.int32)), r"holds no decoder table"),
    "a sequential head of three codebooks": (edit_spec(sequential=True, codebooks=3), r"needs 2 codebooks, .* says 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bundle_that_does_not_fit_is_refused_with_a_sentence(bundle_copy: Path, case: str) -> None:
    damage, sentence = REFUSED[case]
    damage(bundle_copy)
    with pytest.raises(BundleError, match=sentence) as caught:
        load_bundle(bundle_copy)
    assert str(bundle_copy) in str(caught.value) or "manifest says" in str(caught.value) or case == "another execute"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: (b / "manifest.json").write_text("5"),
        lambda b: rewrite(b, fingerprints={}),
    ],
    ids=["a number", "no fingerprints"],
)
def test_a_manifest_of_another_make_is_refused(bundle_copy: Path, damage: Damage) -> None:
    damage(bundle_copy)
    with pytest.raises(BundleError):
        load_bundle(bundle_copy)


def test_a_manifest_from_before_sequential_heads_is_read(bundle_copy: Path) -> None:
    spec = json.loads((bundle_copy / "manifest.json").read_text())["spec"]
    assert spec.pop("sequential") is False
    rewrite(bundle_copy, spec=spec)
    assert load_bundle(bundle_copy).spec.sequential is False


def test_the_undamaged_copy_loads(bundle_copy: Path, tiny_bundle: Path) -> None:
    copy, original = load_bundle(bundle_copy), load_bundle(tiny_bundle)
    assert (copy.name, copy.env) == ("tiny", "ball")
    assert copy.fingerprint == original.fingerprint
    # Other policies, and it is another bundle, even where the difference is in a comment.
    for file in PARTS.values():
        before = (bundle_copy / file).read_bytes()
        if file.endswith(".onnx"):
            model = onnx.load(bundle_copy / file)
            model.doc_string += "x"
            onnx.save(model, bundle_copy / file)
            vouch(bundle_copy)
            assert load_bundle(bundle_copy).fingerprint != original.fingerprint
        (bundle_copy / file).write_bytes(before)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown bundle 'bal'; did you mean 'ball'\? Known: .*ball"):
        load_bundle("bal")


def test_an_unknown_execution_provider(tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match=r"'NoSuchProvider' is not part of this ONNX Runtime; it has .*CPUExecution"):
        load_bundle(tiny_bundle, provider="NoSuchProvider")


@pytest.mark.parametrize("threads", [0, -1])
def test_at_least_one_thread_computes(tiny_bundle: Path, threads: int) -> None:
    with pytest.raises(ConfigError, match=f"threads must be at least 1, got {threads}"):
        load_bundle(tiny_bundle, threads=threads)


def test_every_refusal_is_in_one_tree() -> None:
    assert issubclass(BundleError, SpecactError)
    assert issubclass(ConfigError, SpecactError)


# --- the exported policies are the trained ones ---


@pytest.fixture(scope="module")
def networks(tiny_run: Path, tiny_recipe: Path) -> dict[str, VQBeT]:
    """The trained networks, their weights rounded to half precision as the export says it does."""
    recipe = load_recipe(tiny_recipe)
    assert recipe.precision == "float16" and recipe.env is not None
    task = load_task(recipe.env)
    shown = demonstrations(task, (), recipe.generate_episodes, recipe.generate_noise, recipe.seed)
    data = stages.prepare(shown, recipe)
    made, specs = {}, stages.specs_of(recipe, shown)
    for role in ("draft", "target"):
        model = VQBeT(stages.shapes_of(data, recipe, specs[role]), recipe.policies[role], data.statistics)
        weights, _ = checkpoint.read(tiny_run / f"{role}.safetensors")
        buffers = ("state_mean", "state_std", "goal_mean", "goal_std")
        model.load_state_dict({k: v if k in buffers else v.half().float() for k, v in weights.items()})
        made[role] = model.eval()
    return made


def some_windows(model: VQBeT, count: int) -> tuple[list[Window], dict[str, torch.Tensor]]:
    seen = example_inputs(model, count)
    assert set(seen) == {"state", "goal"}
    return [Window({name: values[row].numpy() for name, values in seen.items()}) for row in range(count)], seen


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("count", [1, 7])
def test_onnx_runtime_answers_like_pytorch(
    tiny_bundle: Path, networks: dict[str, VQBeT], role: str, count: int
) -> None:
    bundle, model = load_bundle(tiny_bundle), networks[role]
    windows, seen = some_windows(model, count)
    with torch.no_grad():
        logits, offsets = LastPosition(model)(seen)
    answers = getattr(bundle, role).infer_batch(windows)
    assert len(answers) == count
    for answer, row, offset in zip(answers, logits, offsets, strict=True):
        np.testing.assert_allclose(answer.probs, row.double().softmax(-1).numpy(), atol=PARITY)
        np.testing.assert_allclose(answer.probs.sum(-1), 1.0, rtol=1e-12)
        np.testing.assert_allclose(answer.offsets, offset.numpy(), atol=PARITY)
    assert bundle.manifest["parity"][role] < PARITY
    assert bundle.manifest["parameters"][role] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_window_is_answered_alike_alone_and_in_a_batch(
    tiny_bundle: Path, networks: dict[str, VQBeT], role: str
) -> None:
    policy: OnnxPolicy = getattr(load_bundle(tiny_bundle), role)
    windows, _ = some_windows(networks[role], 16)
    for window, row in zip(windows, policy.infer_batch(windows), strict=True):
        alone = policy.infer(window)
        np.testing.assert_allclose(row.probs, alone.probs, atol=1e-5)
        np.testing.assert_allclose(row.offsets, alone.offsets, atol=1e-5)
    assert not np.allclose(policy.infer(windows[0]).probs, policy.infer(windows[1]).probs, atol=1e-4)


def stored_bytes(proto: onnx.ModelProto, kind: int) -> int:
    return sum(numpy_helper.to_array(t).nbytes for t in proto.graph.initializer if t.data_type == kind)


def test_storing_as_half_halves_the_weights_and_computes_the_same(tiny_bundle: Path, tmp_path: Path) -> None:
    """Undoes what the export did, independently, and does it again."""
    stored = onnx.load(tiny_bundle / "target.onnx")
    full = onnx.ModelProto()
    full.CopyFrom(stored)
    for tensor in full.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name.removesuffix(".half")))
    names = {tensor.name for tensor in full.graph.initializer}
    nodes = [node for node in full.graph.node if not (node.op_type == "Cast" and node.output[0] in names)]
    del full.graph.node[:]
    full.graph.node.extend(nodes)
    onnx.checker.check_model(full)

    weights, small = stored_bytes(full, TensorProto.FLOAT), stored_bytes(stored, TensorProto.FLOAT)
    halves = stored_bytes(stored, TensorProto.FLOAT16)
    assert weights == small + 2 * halves
    assert small < 0.15 * weights, "what is left in full precision is biases and statistics"
    saved = len(full.SerializeToString()) - len(stored.SerializeToString())
    assert saved == pytest.approx(halves, rel=0.1)

    again = onnx.ModelProto()
    again.CopyFrom(full)
    export.store_as_half(again)
    assert stored_bytes(again, TensorProto.FLOAT16) == halves

    rng = np.random.default_rng(0)
    feeds = {"state": rng.normal(size=(5, 2, 8)).astype(np.float32), "goal": rng.normal(size=(5, 2)).astype(np.float32)}
    results = []
    for proto in (full, stored, again):
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        results.append(session.run(None, feeds))
    # The numbers are the same; the engine may fuse one graph other than the other, and then sums in another order.
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    halves_of = [
        {t.name: t.raw_data for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT16}
        for proto in (stored, again)
    ]
    assert halves_of[0] == halves_of[1]


def test_weights_that_half_precision_does_not_hold_stay_as_they_are() -> None:
    exact, odd = np.arange(64, dtype=np.float32), np.full(64, 0.1, np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["exact", "odd"], ["y"])],
        "g",
        [],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])],
        [numpy_helper.from_array(exact, "exact"), numpy_helper.from_array(odd, "odd")],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    export.store_as_half(proto)
    assert {t.name: t.data_type for t in proto.graph.initializer} == {
        "exact.half": TensorProto.FLOAT16,
        "odd": TensorProto.FLOAT,
    }
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {})[0], exact + odd)


def test_an_exported_policy_holds_no_path_of_the_machine_it_was_made_on(tiny_bundle: Path) -> None:
    """Else the fingerprint of the same weights depends on where the checkout lies."""
    source = str(Path(export.__file__).parents[2]).encode()
    for part in ("draft.onnx", "target.onnx"):
        assert source not in (tiny_bundle / part).read_bytes()


def test_every_part_may_be_read_by_those_who_may_read_the_manifest(tiny_bundle: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in tiny_bundle.iterdir()}
    assert set(modes.values()) == {modes["manifest.json"]}


def test_a_folder_of_data_named_like_a_bundle_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ball").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (find_bundle("ball") / "manifest.json").is_file()
    with pytest.raises(BundleError, match=r"has no manifest\.json"):
        load_bundle("mine")
