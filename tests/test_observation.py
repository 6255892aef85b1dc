"""Observations as named arrays: what two policies need together, and what the device keeps for them."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.errors import BundleError, ObservationError
from specact.observation import Field, ObservationHistory, ObservationSpec, Window, read_spec, vectors

MANY = ObservationSpec(
    {
        "state": Field((2,), history=3),
        "joints.right": Field((1,), history=1),
        "force": Field((2, 2), history=2),
        "goal": Field((1,), history=0),
        "image.front": Field((2, 3, 3), "uint8", 2),
        "image.wrist": Field((1, 1, 3), "uint8", 0),
    },
    instruction=True,
)


def everything(i: int) -> dict[str, Any]:
    return {
        "state": np.array([i, -i], np.float32),
        "joints.right": [2 * i],
        "force": np.full((2, 2), 3.0 * i),
        "goal": np.array([4.0 * i]),
        "image.front": np.full((2, 3, 3), i, np.uint8),
        "image.wrist": np.full((1, 1, 3), 10 + i, np.uint8),
        "instruction": f"go to {i}",
        "reward": "ignored",
    }


def shapes_of(spec: ObservationSpec) -> dict[str, tuple[int, ...]]:
    return {name: field.window_shape for name, field in spec.fields.items()}


def same(window: Window, wanted: Window) -> None:
    assert window.instruction == wanted.instruction and list(window.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        assert window[name].dtype == array.dtype
        np.testing.assert_array_equal(window[name], array)


# ---- the history ----------------------------------------------------------------------------------------------------


def test_every_array_has_its_own_history_and_the_instruction_is_the_newest() -> None:
    history = ObservationHistory(MANY)
    windows = [history.push(everything(i)) for i in range(1, 5)]
    assert [window["state"][:, 0].tolist() for window in windows] == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4]]
    newest = windows[-1]
    assert newest["state"].dtype == np.float32 and newest["joints.right"].tolist() == [[8]]
    assert newest["force"][:, 0, 1].tolist() == [9, 12] and newest["goal"].tolist() == [16]
    assert newest["image.front"][:, 1, 2, 0].tolist() == [3, 4] and newest["image.front"].dtype == np.uint8
    assert newest["image.wrist"].tolist() == [[[14, 14, 14]]] and newest.instruction == "go to 4"
    assert {name: array.shape for name, array in newest.arrays.items()} == shapes_of(MANY)
    history.reset()
    assert history.push(everything(7))["state"][:, 0].tolist() == [7, 7, 7]
    # One array is the state, and what is not wanted is not there.
    plain = ObservationHistory(vectors(2, state=2))
    for observation in (everything(1), np.array([1, -1])):
        window = plain.push(observation)
        assert set(window.arrays) == {"state"} and window.instruction is None and window["state"][1].tolist() == [1, -1]


@pytest.mark.parametrize("name", ["state", "goal", "image.front", "image.wrist"])
def test_what_the_caller_does_with_its_arrays_later_changes_no_window(name: str) -> None:
    shown = everything(1)  # environments reuse their buffers
    window = ObservationHistory(MANY).push(shown)
    before = window[name].copy()
    shown[name][:] = 9
    np.testing.assert_array_equal(window[name], before)


@pytest.mark.parametrize(
    ("change", "named", "cause"),
    [
        ({"state": np.array([np.nan, 1.0])}, r"state.*\[0\]", "not_finite"),
        ({"state": np.array([0.0, np.inf])}, r"state.*\[1\]", "not_finite"),
        ({"joints.right": [1e39]}, r"joints\.right", "not_finite"),
        ({"force": [[0.0, 0.0], [np.nan, 0.0]]}, "force", "not_finite"),
        ({"state": np.zeros(3)}, r"state.*\(3,\)", "shape"),
        ({"state": 1.0}, "state", "shape"),
        ({"image.front": np.zeros((2, 2, 3), np.uint8)}, r"image\.front", "shape"),
        ({"state": ["0.1", "0.2"]}, "state", "type"),
        ({"state": np.array(["0.1", 0.2], object)}, "state.*text", "type"),
        ({"state": [[1.0], [1.0, 2.0]]}, "state", "type"),
        ({"state": {"x": 1.0}}, "state", "type"),
        ({"state": [10**400, 0]}, "state", "type"),
        ({"state": np.zeros(2, complex)}, "state.*complex", "type"),
        ({"state": None}, "state", "shape"),
        ({"image.wrist": None}, r"image\.wrist", "type"),
        ({"image.wrist": np.zeros((1, 1, 3))}, r"image\.wrist", "type"),
        ({"instruction": None}, "'instruction'", "missing"),
        ({"instruction": b"go"}, "bytes", "type"),
        ({"goal": ...}, "'goal'", "missing"),
        ({"image.front": ...}, "'image.front'", "missing"),
        (None, "None", "absent"),
        (np.zeros(2), "'joints.right'", "missing"),
    ],
)
def test_what_cannot_be_used_is_named_and_leaves_the_window_as_it_was(change: Any, named: str, cause: str) -> None:
    history, twin = ObservationHistory(MANY), ObservationHistory(MANY)
    for copy in (history, twin):
        copy.push(everything(1))
    bad = change
    if isinstance(change, dict):
        bad = {name: value for name, value in (everything(2) | change).items() if value is not ...}
    with pytest.raises(ObservationError, match=named) as caught:
        history.push(bad)
    assert caught.value.cause == cause
    same(history.push(everything(3)), twin.push(everything(3)))


# ---- specs of two policies ------------------------------------------------------------------------------------------


NAMES = ("state", "goal", "joints.left", "image", "image.front")
# What a name is like is the same in every spec, up to how much of its past a policy sees.
KINDS: Mapping[str, Field] = {
    "state": Field((2,)),
    "goal": Field((3,), history=0),
    "joints.left": Field((1, 2)),
    "image": Field((2, 2, 3), "uint8"),
    "image.front": Field((1, 2, 3), "uint8", 0),
}


@st.composite
def specs(draw: st.DrawFn) -> ObservationSpec:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    fields = {}
    for name in names:
        kind = KINDS[name]
        history = draw(st.integers(1, 4)) if kind.history else 0
        fields[name] = Field(kind.shape, kind.dtype, history)
    return ObservationSpec(fields, draw(st.booleans()))


def shown(spec: ObservationSpec, moment: int) -> dict[str, Any]:
    """An observation of a spec that no other moment has."""
    arrays: dict[str, Any] = {
        name: np.arange(math.prod(field.shape)).reshape(field.shape).astype(field.dtype)
        + np.dtype(field.dtype).type(moment)
        for name, field in spec.fields.items()
    }
    return arrays | ({"instruction": f"moment {moment}"} if spec.instruction else {})


@given(specs(), specs(), st.integers(1, 7))
def test_what_is_kept_for_two_policies_holds_exactly_what_each_would_have_kept_alone(
    first: ObservationSpec, second: ObservationSpec, moments: int
) -> None:
    both = first.union(second)
    histories = [ObservationHistory(spec) for spec in (both, first, second)]
    for moment in range(moments):
        kept, *alone = [history.push(shown(both, moment)) for history in histories]
    for spec, wanted in zip((first, second), alone, strict=True):
        same(spec.select(kept), wanted)


@given(specs(), specs(), specs())
def test_a_union_is_idempotent_associative_and_the_same_either_way_round_up_to_order(
    first: ObservationSpec, second: ObservationSpec, third: ObservationSpec
) -> None:
    assert first.union(first) == first
    assert first.union(second) == second.union(first)  # mappings are equal in any order
    assert hash(first.union(second)) == hash(second.union(first))
    assert first.union(second).union(third) == first.union(second.union(third))
    assert first.union(second).union(first) == first.union(second)


@given(specs(), specs(), st.integers(1, 5))
def test_stacked_windows_are_the_selected_ones_one_after_the_other(
    first: ObservationSpec, second: ObservationSpec, count: int
) -> None:
    history = ObservationHistory(first.union(second))
    windows = [history.push(shown(first.union(second), moment)) for moment in range(count)]
    stacked = first.stack(windows)
    assert list(stacked) == list(first.fields)
    for row, window in enumerate(windows):
        for name, array in first.select(window).arrays.items():
            np.testing.assert_array_equal(stacked[name][row], array)
            assert stacked[name].dtype == np.dtype(first[name].dtype)
            assert stacked[name].shape == (count, *first[name].window_shape)


@given(specs())
def test_a_spec_survives_being_written_down(spec: ObservationSpec) -> None:
    said = json.loads(json.dumps(spec.describe()))
    result = read_spec(said)
    assert result == spec and hash(result) == hash(spec) and list(result.fields) == list(spec.fields)
    assert result.describe() == spec.describe()


@given(specs())
def test_sizes_are_those_of_a_window_of_zeros(spec: ObservationSpec) -> None:
    window = spec.zeros()
    assert {name: array.shape for name, array in window.arrays.items()} == shapes_of(spec)
    assert sum(array.nbytes for array in window.arrays.values()) == spec.nbytes
    assert (window.instruction is None) == (not spec.instruction)
    assert set(spec.images) == {name for name, array in window.arrays.items() if array.dtype == np.uint8}
    kept = spec.vectors
    assert set(spec.images) | set(kept.fields if kept else ()) == set(spec.fields)
    assert spec.history == max(1, *(field.history for field in spec.fields.values()))


@given(specs(), st.integers(1, 4))
def test_a_shortened_spec_sees_the_newest_end_of_the_same(spec: ObservationSpec, history: int) -> None:
    window = ObservationHistory(spec).push(shown(spec, 1))
    short = spec.shortened(history)
    for name, array in short.select(window).arrays.items():
        kept = window[name][-history:] if spec[name].history else window[name]
        np.testing.assert_array_equal(array, kept)
    assert short.union(spec) == spec


@pytest.mark.parametrize(
    "field",
    [Field((3,), history=2), Field((2, 1), history=2), Field((2,), history=0), Field((2, 2, 3), "uint8", 2)],
)
def test_two_policies_that_mean_different_arrays_by_one_name_are_refused(field: Field) -> None:
    first, second = vectors(2, state=2), ObservationSpec({"state": field})
    for left, right in ((first, second), (second, first)):
        with pytest.raises(BundleError, match="'state'"):
            left.union(right)


@pytest.mark.parametrize(
    ("shape", "dtype", "history"),
    [
        ((), "float32", 1), ((0,), "float32", 1), (((1 << 20) + 1,), "float32", 1), ((2,), "float32", -1),
        ((2,), "float32", None), ((2,), "float64", 1), ((2, 2), "uint8", 1), ((2, 2, 4), "uint8", 1),
    ],
)  # fmt: skip
def test_arrays_that_no_observation_can_have(shape: Any, dtype: Any, history: Any) -> None:
    with pytest.raises(BundleError):
        Field(shape, dtype, history)
    fields = {"state": {"shape": list(shape), "dtype": dtype, "history": history}}
    with pytest.raises(BundleError):
        read_spec({"fields": fields, "instruction": False})


@pytest.mark.parametrize("name", ["", "image.", "a b", "1st", "a" * 65, 7])
def test_names_that_no_graph_could_have(name: Any) -> None:
    with pytest.raises(BundleError):
        ObservationSpec({name: Field((1,))})


def test_a_spec_is_not_changed_through_the_mapping_it_was_made_of() -> None:
    fields = {"state": Field((2,))}
    spec = ObservationSpec(fields)
    fields["goal"] = Field((1,))
    assert list(spec.fields) == ["state"]
    with pytest.raises(TypeError):
        spec.fields["goal"] = Field((1,))  # type: ignore[index]


def test_vectors_have_one_history_and_a_goal_has_none() -> None:
    assert vectors(5, goal=2, state=8, force=3) == ObservationSpec(
        {"state": Field((8,), history=5), "force": Field((3,), history=5), "goal": Field((2,), history=0)}
    )
