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
from specact.observation import (
    Field,
    ObservationHistory,
    ObservationSpec,
    Window,
    read_spec,
    vectors,
)

PLAIN = vectors(4, state=2)
FULL = ObservationSpec(
    {"state": Field((2,), history=3), "goal": Field((3,), history=0), "image": Field((2, 5, 3), "uint8", 3)}
)


def observation(i: int) -> dict[str, Any]:
    return {
        "state": np.array([i, -i], np.float64),
        "goal": np.array([i, 0.5, 2.0], np.float32),
        "image": np.full((2, 5, 3), i, np.uint8),
    }


def test_repeats_the_first_observation_then_moves_on_oldest_first() -> None:
    window = ObservationHistory(PLAIN)
    seen = [window.push(np.array([i, 10 * i]))["state"][:, 0].tolist() for i in range(1, 7)]
    assert seen == [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


def test_window_of_one_is_the_newest_observation() -> None:
    window = ObservationHistory(vectors(1, state=2))
    assert [window.push(np.array([i, i]))["state"].tolist() for i in (1, 2)] == [[[1, 1]], [[2, 2]]]


def test_fields_have_the_promised_shapes_and_types() -> None:
    found = ObservationHistory(FULL).push(observation(1))
    assert set(found.arrays) == {"state", "goal", "image"}
    assert found["state"].shape == (3, 2) and found["state"].dtype == np.float32
    assert found["goal"].tolist() == [1.0, 0.5, 2.0] and found["goal"].dtype == np.float32
    assert found["image"].shape == (3, 2, 5, 3) and found["image"].dtype == np.uint8
    plain = ObservationHistory(PLAIN).push(observation(1))  # goal and image are there, but not wanted
    assert set(plain.arrays) == {"state"}


def test_images_move_with_the_states_and_only_the_newest_goal_counts() -> None:
    window = ObservationHistory(FULL)
    for i in range(1, 6):
        found = window.push(observation(i))
    assert found["image"][:, 0, 0, 0].tolist() == [3, 4, 5] == found["state"][:, 0].tolist()
    assert found["goal"][0] == 5


def test_reset_forgets() -> None:
    window = ObservationHistory(FULL)
    window.push(observation(1))
    window.reset()
    found = window.push(observation(7))
    assert found["state"][:, 0].tolist() == [7, 7, 7] == found["image"][:, 1, 1, 1].tolist()


def test_earlier_windows_stay_as_they_were() -> None:
    window = ObservationHistory(FULL)
    first = window.push(observation(1))
    window.push(observation(2))
    assert first["state"][:, 0].tolist() == [1, 1, 1] == first["image"][:, 0, 0, 0].tolist()


@pytest.mark.parametrize("field", ["state", "image", "goal"])
def test_what_the_caller_does_with_its_arrays_later_changes_no_window(field: str) -> None:
    # Environments reuse their buffers.
    shown = observation(1) | {"state": np.array([1, -1], np.float32)}
    found = ObservationHistory(FULL).push(shown)
    before = found[field].copy()
    shown[field][:] = 9
    np.testing.assert_array_equal(found[field], before)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"state": np.array([np.nan, 1.0])}, r"state is NaN or infinite at \[0\]"),
    ({"state": np.array([0.0, np.inf])}, r"state is NaN or infinite at \[1\]"),
    ({"goal": np.array([0.0, 0.0, -np.inf])}, r"goal is NaN or infinite at \[2\]"),
    ({"state": np.zeros(3)}, r"state has shape \(3,\)"),
    ({"state": np.zeros((1, 2))}, r"state has shape \(1, 2\)"),
    ({"goal": np.zeros(2)}, r"goal has shape \(2,\)"),
    ({"state": 1.0}, r"state has shape \(\)"),
    ({"state": ["left", "right"]}, "state is not an array of numbers"),
    ({"state": [[1.0], [1.0, 2.0]]}, "state is not an array of numbers"),
    ({"state": {"x": 1.0}}, "state is not an array of numbers"),
    ({"state": [10**400, 0]}, "state is not an array of numbers: int too large"),
    ({"goal": np.array([10**400, 0, 0], object)}, "goal is not an array of numbers: int too large"),
    ({"state": ["0.1", "0.2"]}, "state is not an array of numbers: it holds <U3"),
    ({"state": np.array(["0.1", 0.2], object)}, "state is not an array of numbers: it holds text"),
    ({"state": np.array(["2020-01-01", "2020-01-02"], "M8[D]")}, "state is not an array of numbers: it holds datetime"),
    ({"state": np.zeros(2, complex)}, "state is not an array of numbers: it holds complex128"),
    ({"state": None}, "state"),
    ({"image": None}, r"image .* must be uint8 \(2, 5, 3\)"),
    ({"image": np.zeros((2, 5, 3), np.float32)}, r"image .* must be uint8 \(2, 5, 3\)"),
    ({"image": np.zeros((3, 2, 5), np.uint8)}, r"image .* must be uint8 \(2, 5, 3\)"),
]


def refuses_and_stays(bad: Any, message: str) -> None:
    """The error is raised, and the window goes on as if the bad observation had never come."""
    window, twin = ObservationHistory(FULL), ObservationHistory(FULL)
    for i in (1, 2):
        window.push(observation(i))
        twin.push(observation(i))
    with pytest.raises(ObservationError, match=message):
        window.push(bad)
    after, wanted = window.push(observation(3)), twin.push(observation(3))
    for name in FULL.fields:
        np.testing.assert_array_equal(after[name], wanted[name])


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_field_is_refused_and_leaves_the_window_unchanged(change: dict[str, Any], message: str) -> None:
    refuses_and_stays(observation(9) | change, message)


@pytest.mark.parametrize("missing", ["state", "goal", "image"])
def test_a_missing_field_is_refused_and_leaves_the_window_unchanged(missing: str) -> None:
    refuses_and_stays({name: value for name, value in observation(9).items() if name != missing}, missing)


def test_a_bare_state_is_refused_where_more_is_needed() -> None:
    refuses_and_stays(np.zeros(2), r"no 'goal'; this policy needs goal \[3\]")


# ---- several arrays, cameras and an instruction ---------------------------------------------------------------------


MANY = ObservationSpec(
    {
        "joints.left": Field((2,), history=3),
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
        "joints.left": [i, -i],
        "joints.right": np.array([2 * i]),
        "force": np.full((2, 2), 3.0 * i),
        "goal": np.array([4.0 * i]),
        "image.front": np.full((2, 3, 3), i, np.uint8),
        "image.wrist": np.full((1, 1, 3), 10 + i, np.uint8),
        "instruction": f"go to {i}",
        "reward": "ignored",
    }


def test_every_array_has_its_own_history_and_the_instruction_is_the_newest() -> None:
    history = ObservationHistory(MANY)
    for i in range(1, 5):
        found = history.push(everything(i))
    assert found["joints.left"].tolist() == [[2, -2], [3, -3], [4, -4]]
    assert found["joints.right"].tolist() == [[8]]
    assert found["force"][:, 0, 1].tolist() == [9, 12]
    assert found["goal"].tolist() == [16]
    assert found["image.front"][:, 1, 2, 0].tolist() == [3, 4]
    assert found["image.wrist"].tolist() == [[[14, 14, 14]]]
    assert found.instruction == "go to 4"
    assert {name: list(array.shape) for name, array in found.arrays.items()} == MANY.shapes
    assert ObservationHistory(PLAIN).push(observation(1) | {"instruction": "stop"}).instruction is None


@pytest.mark.parametrize(
    ("change", "message", "cause"),
    [
        ({"instruction": None}, "'instruction'", "missing"),
        ({"instruction": b"go"}, "bytes", "type"),
        ({"image.wrist": np.zeros((1, 1, 3))}, r"image\.wrist .* must be uint8 \(1, 1, 3\)", "type"),
        ({"image.front": np.zeros((2, 2, 3), np.uint8)}, r"image\.front .*must be uint8 \(2, 3, 3\)", "shape"),
        ({"joints.right": [np.inf]}, r"joints\.right is NaN or infinite at \[0\]", "not_finite"),
        ({"joints.right": [1e39]}, r"joints\.right is NaN or infinite at \[0\]", "not_finite"),
        ({"force": [[0.0, 0.0], [np.nan, 0.0]]}, "force is NaN or infinite at some places", "not_finite"),
        ({"force": np.zeros(4)}, r"force has shape \(4,\)", "shape"),
    ],
)
def test_one_bad_array_among_many_is_named_and_changes_none(change: dict[str, Any], message: str, cause: str) -> None:
    history, twin = ObservationHistory(MANY), ObservationHistory(MANY)
    history.push(everything(1))
    twin.push(everything(1))
    with pytest.raises(ObservationError, match=message) as caught:
        history.push(everything(2) | change)
    assert caught.value.cause == cause
    same(history.push(everything(3)), twin.push(everything(3)))


def test_no_observation_at_all_is_refused() -> None:
    with pytest.raises(ObservationError, match="the observation is None"):
        ObservationHistory(PLAIN).push(None)  # type: ignore[arg-type]


def same(found: Window, wanted: Window) -> None:
    assert found.instruction == wanted.instruction
    assert list(found.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


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
    one: ObservationSpec, other: ObservationSpec, moments: int
) -> None:
    both = one.union(other)
    histories = [ObservationHistory(spec) for spec in (both, one, other)]
    for moment in range(moments):
        kept, *alone = [history.push(shown(both, moment)) for history in histories]
    for spec, wanted in zip((one, other), alone, strict=True):
        same(spec.select(kept), wanted)


@given(specs(), specs(), specs())
def test_a_union_is_idempotent_associative_and_the_same_either_way_round_up_to_order(
    one: ObservationSpec, other: ObservationSpec, third: ObservationSpec
) -> None:
    assert one.union(one) == one
    assert one.union(other) == other.union(one)  # mappings are equal in any order
    assert hash(one.union(other)) == hash(other.union(one))
    assert one.union(other).union(third) == one.union(other.union(third))
    assert one.union(other).union(one) == one.union(other)


@given(specs(), specs(), st.integers(1, 5))
def test_stacked_windows_are_the_selected_ones_one_after_the_other(
    one: ObservationSpec, other: ObservationSpec, count: int
) -> None:
    history = ObservationHistory(one.union(other))
    windows = [history.push(shown(one.union(other), moment)) for moment in range(count)]
    stacked = one.stack(windows)
    assert list(stacked) == list(one.fields)
    for row, window in enumerate(windows):
        for name, array in one.select(window).arrays.items():
            np.testing.assert_array_equal(stacked[name][row], array)
            assert stacked[name].dtype == np.dtype(one[name].dtype)
            assert stacked[name].shape == (count, *one[name].window_shape)


@given(specs())
def test_a_spec_survives_being_written_down(spec: ObservationSpec) -> None:
    said = json.loads(json.dumps(spec.describe()))
    found = read_spec(said)
    assert found == spec and hash(found) == hash(spec) and list(found.fields) == list(spec.fields)
    assert found.describe() == spec.describe()


@given(specs())
def test_sizes_are_those_of_a_window_of_zeros(spec: ObservationSpec) -> None:
    window = spec.zeros()
    assert {name: list(array.shape) for name, array in window.arrays.items()} == spec.shapes
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
    "other",
    [Field((3,), history=2), Field((2, 1), history=2), Field((2,), history=0), Field((2, 2, 3), "uint8", 2)],
)
def test_two_policies_that_mean_different_arrays_by_one_name_are_refused(other: Field) -> None:
    one, another = vectors(2, state=2), ObservationSpec({"state": other})
    for left, right in ((one, another), (another, one)):
        with pytest.raises(BundleError, match=r"the observation 'state' is .* for one policy and .* for the other"):
            left.union(right)


@pytest.mark.parametrize(
    ("shape", "dtype", "history"),
    [
        ((), "float32", 1),
        ((0,), "float32", 1),
        ((-2,), "float32", 1),
        ((1.5,), "float32", 1),
        ((True,), "float32", 1),
        ((2,), "float32", -1),
        ((2,), "float32", 1.0),
        ((2,), "float32", None),
        ((2,), "float32", (1 << 20) + 1),
        (((1 << 20) + 1,), "float32", 1),
        ((2,), "float64", 1),
        ((2,), ["float32"], 1),
        ((2, 2), "uint8", 1),
        ((2, 2, 4), "uint8", 1),
        ((3, 2, 2), "uint8", 1),
    ],
)
def test_arrays_that_no_observation_can_have(shape: Any, dtype: Any, history: Any) -> None:
    with pytest.raises(BundleError):
        Field(shape, dtype, history)
    fields = {"state": {"shape": list(shape), "dtype": dtype, "history": history}}
    with pytest.raises(BundleError):
        read_spec({"fields": fields, "instruction": False})


@pytest.mark.parametrize("name", ["", "image.", ".image", "a b", "image/front", "1st", "a" * 65, 7, None])
def test_names_that_no_graph_could_have(name: Any) -> None:
    with pytest.raises(BundleError):
        ObservationSpec({name: Field((1,))})


FIELD = {"shape": [2], "dtype": "float32", "history": 1}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "state",
        3,
        {},
        {"fields": {}, "instruction": False},
        {"fields": [FIELD], "instruction": False},
        {"fields": {"state": None}, "instruction": False},
        {"fields": {"state": FIELD | {"shape": 2}}, "instruction": False},
        {"fields": {"state": FIELD | {"shape": "22"}}, "instruction": False},
        {"fields": {"state": FIELD | {"shape": [[2]]}}, "instruction": False},
        {"fields": {"state": FIELD | {"history": "1"}}, "instruction": False},
        {"fields": {"state": FIELD}, "instruction": "yes"},
        {"fields": {"state": FIELD}, "instruction": None},
        {"fields": {"state": FIELD}, "instruction": 1},
    ],
)
def test_what_does_not_describe_a_spec_is_refused_with_one_line(value: Any) -> None:
    with pytest.raises(BundleError) as caught:
        read_spec(value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["fields", "instruction", "shape", "dtype", "history", "state"]) | st.text(max_size=3),
                inner,
            )
        ),
    )
)
def test_reading_any_plain_value_gives_a_spec_or_says_why_not(value: Any) -> None:
    try:
        found = read_spec(value)
    except BundleError:
        return
    assert read_spec(found.describe()) == found


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
    assert list(vectors(5, state=8).fields) == ["state"]
