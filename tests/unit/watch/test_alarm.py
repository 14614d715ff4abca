from __future__ import annotations

import pytest

from oomproof.watch.alarm import LEAK, LEVEL, OTHERS, RETRIES, Alarms, Figures, Settings, step_at

LIMIT = 1000


def kinds(alarms: Alarms, **figures: int) -> set[str]:
    return {alarm.kind for alarm in alarms.observe(Figures(limit_bytes=LIMIT, **figures))}


def test_a_healthy_flat_run_never_alarms() -> None:
    """Flat memory below the level, with a sawtooth and a warm-up, gives no alarm."""
    alarms = Alarms()
    for step in range(500):
        peak = min(step, 10) * 50 + (step % 7) * 10
        assert not kinds(alarms, step=step, allocated_peak_bytes=peak, others_bytes=20 + step % 3), step


def test_what_is_cached_and_reusable_does_not_count() -> None:
    """The level is of the allocated peak plus what cannot be reused; 85 % is reached only by both."""
    assert not kinds(Alarms(), step=0, allocated_peak_bytes=800, not_reusable_bytes=49)
    assert kinds(Alarms(), step=0, allocated_peak_bytes=800, not_reusable_bytes=50) == {LEVEL}


def test_hysteresis_of_the_level() -> None:
    """The level alarm rises at 85 %, stands between 80 and 85 %, falls below 80 %, and must reach 85 % again."""
    alarms = Alarms()
    seen = [bool(kinds(alarms, step=s, allocated_peak_bytes=b)) for s, b in enumerate([849, 850, 810, 800, 799, 849])]
    assert seen == [False, True, True, True, False, False]


@pytest.mark.parametrize("per_step", [1, 3, 7, 1 << 20])
@pytest.mark.parametrize("start", [0, 5, 12345])
def test_a_leak_is_extrapolated_exactly_on_a_line(per_step: int, start: int) -> None:
    """On a line the step told is the first whose size is at or past the limit."""
    points = [(step, start + per_step * step) for step in range(10, 30)]
    limit = start + per_step * 777 - (per_step - 1)
    told = step_at(points, limit)
    assert told is not None
    assert start + per_step * told >= limit > start + per_step * (told - 1)


def test_a_leak_is_told_with_its_step_and_ends_with_the_growth() -> None:
    """The leak alarm names the step that hits the limit; it falls once the growth has stopped."""
    alarms = Alarms()
    for step in range(20):
        standing = alarms.observe(Figures(step=step, limit_bytes=LIMIT, allocated_peak_bytes=100 + 2 * step))
    assert [(alarm.kind, alarm.hits_step) for alarm in standing] == [(LEAK, 450)]
    for step in range(20, 60):
        standing = alarms.observe(Figures(step=step, limit_bytes=LIMIT, allocated_peak_bytes=140))
    assert not standing


def test_others_use_comes_off_the_leaks_limit() -> None:
    """A leak hits earlier by what other processes hold."""
    alarms = Alarms()
    for step in range(20):
        figures = Figures(step=step, limit_bytes=LIMIT, allocated_peak_bytes=100 + 2 * step, others_bytes=200)
        standing = alarms.observe(figures)
    assert [alarm.hits_step for alarm in standing] == [350]


def test_retries_alarm_for_a_window() -> None:
    """A retry alarms, and the alarm falls a window after the last one; old retries do not alarm."""
    alarms = Alarms(Settings(window=5))
    counts = [9, 9, 10, 10, 10, 10, 10, 10, 10]
    seen = [kinds(alarms, step=s, allocated_peak_bytes=1, retries=n) == {RETRIES} for s, n in enumerate(counts)]
    assert seen == [False, False, True, True, True, True, False, False, False]


def test_another_process_that_grows_alarms() -> None:
    """Growth of others by 5 % of the limit alarms; use that was there from the start does not."""
    alarms = Alarms()
    assert not kinds(alarms, step=0, allocated_peak_bytes=1, others_bytes=500)
    assert not kinds(alarms, step=1, allocated_peak_bytes=1, others_bytes=549)
    assert kinds(alarms, step=2, allocated_peak_bytes=1, others_bytes=550) == {OTHERS}
    assert kinds(alarms, step=3, allocated_peak_bytes=1, others_bytes=530) == {OTHERS}
    assert not kinds(alarms, step=4, allocated_peak_bytes=1, others_bytes=520)


def test_a_script_that_begins_again_is_judged_anew() -> None:
    """Steps that go back forget the growth seen before."""
    alarms = Alarms()
    for step in range(20):
        alarms.observe(Figures(step=step, limit_bytes=LIMIT, allocated_peak_bytes=100 + 2 * step))
    assert not kinds(alarms, step=0, allocated_peak_bytes=200)


@pytest.mark.parametrize("wrong", [{"level": 0.5}, {"clear": 0.9}, {"level": 1.1}, {"window": 2}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    """An alarm that could never fall, or judge a growth, is refused with the cure."""
    with pytest.raises(ValueError, match="must"):
        Settings(**wrong)  # type: ignore[arg-type]
