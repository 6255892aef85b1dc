"""Tables published in TISED (arXiv 2606.28529) and in VLASH (arXiv 2512.01031): inputs to tests, no results of ours."""

from specact.lab.tised.decomposition import Averages

# Kinetix, success by task (car, catapult, catcher, grasp, lunar, cheetah), keyed by refinement steps.
KINETIX_ZERO_DELAY = {
    1: (0.984, 0.555, 0.953, 0.984, 0.914, 0.672),
    3: (1.000, 0.727, 0.984, 0.984, 0.914, 0.836),
    5: (0.992, 0.680, 0.969, 0.953, 0.922, 0.898),
}
KINETIX_AGX_15W = {
    1: (0.984, 0.555, 0.953, 0.984, 0.914, 0.672),
    3: (0.938, 0.461, 0.586, 0.844, 0.914, 0.836),
    5: (0.820, 0.477, 0.500, 0.805, 0.867, 0.844),
}

# DOM: refinement steps, delay [ms], success [%] at 100 % and at 125 % of the speed.
DOM_STEPS = (1, 2, 5, 10)
DOM_SUCCESS = {1.00: (68, 76, 74, 70), 1.25: (36, 34, 48, 46)}

# pi0.5 on the static UR5e task: steps, T_inf [s], and means over successful trials.
PI05_INFERENCE_S = {1: 0.162, 7: 0.186, 10: 0.199}
PI05 = {1: Averages(57.4, 45.42), 7: Averages(49.2, 38.74), 10: Averages(47.2, 37.26)}
# T_task [s] by hardware and steps.
PI05_STEPS = (1, 5, 7, 10)
PI05_TASK_S = {"RTX 4070": (44.6, 41.5, 38.6, 37.1), "AGX 50 W": (159.5, 108.5, 116.9, 119.2)}

# UR5e dynamic, AGX at 30 W: steps, delay [s], successes of 20 at three positions; and of 60 by hardware.
UR5E_DELAY_S = {16: 0.77, 4: 0.41}
UR5E_BY_HARDWARE = {"RTX 4070": {4: 48, 16: 50}, "AGX 30 W": {4: 45, 16: 26}}

# Latency of the AGX at 15 W over that of the RTX 4070: the least and the largest ratio over the step counts.
AGX_15W_OVER_RTX_4070 = (4.3, 8.9)

# VLASH: N / N_0 that its reported chunk and task speedups imply, by delay in actions.
VLASH_CHUNKS_RATIO = {1: 0.975, 2: 1.014, 3: 1.081}
