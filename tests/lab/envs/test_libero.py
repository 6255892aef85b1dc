"""LIBERO's suites: stepped as robosuite steps them, to the bit; nothing of an episode depends on the one before."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("libero", reason="needs LIBERO: pip install 'specact[libero]'")

from libero.libero.benchmark import task_maps
from robosuite.utils.binding_utils import MjRenderContextOffscreen
from robosuite.utils.transform_utils import quat2axisangle
from tests.serving import Here
from tests.tiny import renders

from specact.contracts import check_task
from specact.errors import ConfigError
from specact.lab.envs import evaluated, load_task
from specact.lab.envs.libero import SCENE, STATES, instruction
from specact.lab.envs.task import Task
from specact.load import load_exchange
from specact.observation import Field

# A bowl on the table, and those that begin in a drawer and on a stove, which a reset moves.
NUMBERS = (0, 4, 7)


def scattered(env: Any, steps: int, random: np.random.Generator) -> dict[str, Any]:
    """What is seen after random actions."""
    seen: dict[str, Any] = {}
    for _ in range(steps):
        seen, *_ = env.step(random.uniform(-1, 1, 7).astype(np.float32))
    return seen


@pytest.fixture(scope="module")
def spatial() -> Task:
    return load_task("libero-spatial")


@pytest.mark.parametrize("number", NUMBERS)
def test_an_episode_does_not_depend_on_those_before(spatial: Task, number: int) -> None:
    alone = spatial.only(spatial.tasks[number])
    used: Any = alone.make()
    fresh: Any = alone.make()
    for seed in (11, 5, 11):
        used.reset(seed=seed)
        after = scattered(used, 25, np.random.default_rng(0))
    fresh.reset(seed=11)
    first = scattered(fresh, 25, np.random.default_rng(0))
    assert np.array_equal(first["state"], after["state"])
    assert np.array_equal(fresh.sim.sim.data.qpos, used.sim.sim.data.qpos)
    if "stove" in alone.name:  # and the bowl is on it
        fresh.reset(seed=12)
        site, bowl = fresh.sim.sim.data.get_site_xpos("flat_stove_1_cook_region"), fresh.sim.obj_of_interest[0]
        assert np.linalg.norm(site[:2] - fresh.sim.sim.data.body_xpos[fresh.sim.obj_body_id[bowl]][:2]) < 0.06
    # A reset without the gripper's and the solver's memory is another episode.
    used.reset(seed=11)
    used.sim.robots[0].gripper.current_action = np.ones(2)
    assert not np.array_equal(scattered(used, 25, np.random.default_rng(0))["state"], first["state"])


def test_steps_and_state_are_those_of_robosuite() -> None:
    """Two environments in one state: ours steps one of them, robosuite the other, with its own observations."""
    task = load_task("libero-spatial@benchmark")
    ours: Any = task.only(task.tasks[0]).make()
    theirs: Any = task.only(task.tasks[0]).make()
    for env in (ours, theirs):
        env.reset(seed=3)
    random = np.random.default_rng(0)
    for _ in range(60):
        action = random.uniform(-1, 1, 7).astype(np.float32)
        seen, *_ = ours.step(action)
        observed, *_ = theirs.sim.step(action)
    assert np.array_equal(ours.sim.sim.data.qpos, theirs.sim.sim.data.qpos)
    rotation = quat2axisangle(observed["robot0_eef_quat"])
    state = np.concatenate([observed["robot0_eef_pos"], rotation, observed["robot0_gripper_qpos"]])
    np.testing.assert_allclose(seen["state"], state, atol=0.01)  # theirs is older by a substep


def test_evaluations_begin_in_the_states_of_the_benchmark_and_nothing_else_does() -> None:
    drawn, benchmark = load_task("libero-object"), load_task(evaluated("libero-object"))
    assert benchmark.name == evaluated("libero-object") == evaluated(benchmark.name) == "libero-object@benchmark"
    assert benchmark.states == 10 * STATES and benchmark.start(12345, 511) == 11 and drawn.start(12340, 511) == 12341
    name = drawn.tasks[3]
    alone = load_task(evaluated(f"libero-object/{name}"))
    assert alone.states == STATES and alone.name.endswith(name)
    places = []
    for task, seeds in ((alone, (0, 1, STATES, 0)), (drawn.only(name), (0, 1))):
        env: Any = task.make()
        for seed in seeds:
            env.reset(seed=seed)
            places.append(env.sim.sim.data.qpos.round(4))
    assert np.array_equal(places[0], places[2]) and np.array_equal(places[0], places[3])
    assert len(np.unique(places, axis=0)) == 4
    with pytest.raises(ConfigError, match="ball"):
        load_task("ball@benchmark")


def test_every_suite_of_the_package_is_there_by_name_with_its_words(spatial: Task) -> None:
    with pytest.raises(ConfigError, match="libero-spatial-swap"):
        load_task("libero-spatial-swop")
    words = {instruction("libero_spatial", task) for task in spatial.tasks}
    assert len(words) == 10 and all("bowl" in sentence for sentence in words)
    # A suite with other positions has the same words; one with other words has these.
    assert {instruction("libero_spatial_swap", task) for task in spatial.tasks} == words
    assert not {instruction("libero_spatial_lan", task) for task in spatial.tasks} & words
    assert load_task("libero-10").max_steps > load_task("libero-spatial-lan").max_steps == spatial.max_steps
    assert len(load_task("libero-90").tasks) == len(task_maps["libero_90"])


def test_the_suite_keeps_the_contract_of_environments(spatial: Task) -> None:
    check_task(spatial.only(spatial.tasks[9]))


@renders
def test_cameras_see_what_differs(spatial: Task) -> None:
    sees = {"image.agentview": Field((64, 64, 3), "uint8"), "image.wrist": Field((64, 64, 3), "uint8")}
    env = spatial.seeing({**sees, SCENE: Field((6,))}).make()
    first, _ = env.reset(seed=10)
    second, _ = env.reset(seed=20)
    bowl, plate = first[SCENE].reshape(2, 3)
    assert 0.8 < bowl[2] < 1.2 and 0.05 < np.linalg.norm(bowl - plate) < 0.6
    for name in sees:
        assert first[name].std() > 20 and 0 < np.abs(first[name].astype(int) - second[name]).mean() < 30
    env.close()


@renders
def test_frames_are_those_of_robosuite_turned_by_half(spatial: Task) -> None:
    """As LIBERO's evaluators turn them; ours have simpler meshes and no shadows."""
    sees = {name: Field((128, 128, 3), "uint8") for name in ("image.agentview", "image.wrist")}
    env: Any = spatial.seeing(sees).make()
    ours, _ = env.reset(seed=3)
    sim = env.sim.sim
    context = MjRenderContextOffscreen(sim, device_id=-1)
    context.vopt.geomgroup[0] = 0  # collision shapes
    for name, camera in (("image.agentview", "agentview"), ("image.wrist", "robot0_eye_in_hand")):
        theirs = sim.render(camera_name=camera, width=128, height=128).astype(int)
        apart = {turned: np.abs(ours[name] - seen).mean() for turned, seen in (
            ("half", theirs[::-1, ::-1]), ("not", theirs), ("upright", theirs[::-1]),
        )}  # fmt: skip
        assert apart["half"] < 8 and apart["half"] < 0.5 * min(apart["not"], apart["upright"]), apart
    env.close()


@renders
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_an_openpi_client_drives_the_suite_against_a_server() -> None:
    """As openpi's client for LIBERO does, with frames of the policy's size; all three fail once in 10,000."""
    theirs = pytest.importorskip("openpi_client.websocket_client_policy", reason="needs openpi-client (Makefile)")
    sees = {name: Field((64, 64, 3), "uint8") for name in ("image.agentview", "image.wrist")}
    env: Any = load_task("libero-spatial@benchmark").seeing(sees).make()
    names = {"image": "image.agentview", "wrist_image": "image.wrist", "state": "state"}
    won, actions = list[bool](), list[Any]()
    with Here(load_exchange("libero-spatial-flow"), max_batch=1) as server:
        robot = theirs.WebsocketClientPolicy("127.0.0.1", server.port)
        for number in (0, 1, 2):
            seen, info = env.reset(seed=number)
            over = False
            actions.clear()
            while not over:
                if not actions:
                    request = {f"observation/{name}": seen[ours] for name, ours in names.items()}
                    actions = list(robot.infer({**request, "prompt": seen["instruction"]})["actions"][:10])
                seen, _, ended, late, info = env.step(actions.pop(0))
                over = ended or late
            won.append(info["success"])
        robot._ws.close()
    env.close()
    assert any(won)
