"""The clock of phases: nothing is lost and nothing counted twice."""

import time

import pytest

from train.process.phase_clock import PhaseClock


def test_phases_add_up_to_the_age_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    clock = PhaseClock("start")
    for phase, lasts_s in (("join", 2.0), ("step", 3.0), ("step", 4.0), ("save", 1.0)):
        clock.enter(phase)
        now_s += lasts_s
        with clock.during("data"):
            now_s += 0.5
    assert clock.seconds() == {"start": 0.0, "join": 2.0, "step": 7.0, "save": 1.0, "data": 2.0}
    now_s += 10
    assert clock.seconds()["save"] == 11.0  # the present phase counts before it ends


def test_a_phase_inside_another_ends_with_an_error_too() -> None:
    clock = PhaseClock("step")
    with pytest.raises(ValueError, match="probe"), clock.during("data"):
        raise ValueError("probe")
    assert clock.present()[0] == "step"
