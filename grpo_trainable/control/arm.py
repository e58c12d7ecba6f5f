"""A robot arm that reaches for a ball.

The policy sees the arm and the ball through a camera. Select this
environment with `model.env=grpo_trainable.control.arm:Arm`.

The arm has one joint and moves in a plane. MuJoCo simulates the arm and renders it without a
display. The environment variable `MUJOCO_GL` chooses the renderer: `egl` by default, or `osmesa`,
which needs the library of that name.
"""

from __future__ import annotations

import functools
import os
from typing import Any, ClassVar

import gymnasium
import numpy as np

SIZE = 32  # image height and width, in pixels
STEPS = 25  # actions per episode
SUBSTEPS = 4  # simulation steps of 0.02 s per action
SPEED = 6.0  # joint speed at action 1, in radians per second
REACH = 0.2  # length of the arm, and distance of the ball from the arm's shoulder, in metres
NEAR = 0.04  # distance at which the hand reaches the ball, in metres
SCENE = f"""
<mujoco>
  <option timestep="0.02" gravity="0 0 0" integrator="implicitfast"/>
  <visual>
    <quality shadowsize="0" offsamples="0"/>
    <headlight ambient="0.8 0.8 0.8" diffuse="0 0 0" specular="0 0 0"/>
    <global offwidth="{SIZE}" offheight="{SIZE}"/>
  </visual>
  <worldbody>
    <camera name="above" pos="0 0 1" xyaxes="1 0 0 0 1 0" fovy="28"/>
    <geom type="plane" size="0.3 0.3 0.1" rgba="0 0 0 1" contype="0" conaffinity="0"/>
    <body name="arm" pos="0 0 0.01">
      <joint name="shoulder" axis="0 0 1" damping="0.02"/>
      <geom type="capsule" fromto="0 0 0 {REACH} 0 0" size="0.015" rgba="0 1 0 1" contype="0"
        conaffinity="0"/>
      <site name="hand" pos="{REACH} 0 0"/>
    </body>
    <body name="ball" mocap="true" pos="{REACH} 0 0.01">
      <geom type="sphere" size="0.025" rgba="1 0 0 1" contype="0" conaffinity="0"/>
    </body>
  </worldbody>
  <actuator><velocity joint="shoulder" kv="0.05"/></actuator>
</mujoco>
"""


@functools.cache
def _mujoco() -> Any:
    os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        import mujoco
    except ImportError as error:
        raise ValueError(
            f"the library mujoco cannot be used ({error}); run: pip install -e '.[control]'"
        ) from None
    return mujoco


@functools.cache
def _model() -> Any:
    return _mujoco().MjModel.from_xml_string(SCENE)


@functools.cache
def _renderer() -> Any:
    """Return the renderer that all arms in this process share.

    Only the thread that created the renderer may use it.
    """
    return _mujoco().Renderer(_model(), SIZE, SIZE)


class Arm(gymnasium.Env):
    """Gymnasium environment of the arm.

    An observation consists of the last two frames, (32, 32, 6) uint8. An action is one number, the
    speed of the joint relative to `SPEED`. The reward of an action is -10 times the distance
    between the hand and the ball in metres, plus 1 if the distance is below 4 cm. The seed
    determines the initial angles of the ball and the arm. An episode consists of 25 actions.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 6), np.uint8)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._data = _mujoco().MjData(_model())
        self._hand = _model().site("hand").id

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw the angles of the ball and the arm, and return the first observation."""
        super().reset(seed=seed)
        _mujoco().mj_resetData(_model(), self._data)
        of_arm, of_ball = self.np_random.uniform(-np.pi, np.pi, 2)
        self._data.qpos[0] = of_arm
        self._data.mocap_pos[0, :2] = REACH * np.cos(of_ball), REACH * np.sin(of_ball)
        _mujoco().mj_forward(_model(), self._data)
        self._steps, self._last = 0, self._frame()
        return np.concatenate([self._last, self._last], axis=-1), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the joint for 0.08 s at the relative speed `action`, which is limited to [-1, 1]."""
        self._data.ctrl[0] = SPEED * float(np.clip(action[0], -1.0, 1.0))
        for _ in range(SUBSTEPS):
            _mujoco().mj_step(_model(), self._data)
        self._steps += 1
        before, self._last = self._last, self._frame()
        seen = np.concatenate([before, self._last], axis=-1)
        return seen, self._reward(), False, self._steps >= STEPS, {}

    def _reward(self) -> float:
        hand = self._data.site_xpos[self._hand, :2]
        distance = float(np.linalg.norm(hand - self._data.mocap_pos[0, :2]))
        return -10 * distance + (distance < NEAR)

    def _frame(self) -> np.ndarray:
        _renderer().update_scene(self._data, "above")
        return _renderer().render()
